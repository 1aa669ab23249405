/* Prints what a checkpoint holds, as JSON. */
#include <moekit/c_api.h>
#include <stdio.h>

int main(int argc, char** argv) {
  char* json = NULL;
  if (argc != 2) return 2;
  if (moekit_inspect(argv[1], 0, &json) != MOEKIT_OK) {
    fprintf(stderr, "%s\n", moekit_last_error());
    return 1;
  }
  puts(json);
  moekit_string_free(json);
  return 0;
}
