/* What libmoekit_mpi.so offers to libmoekit: MPI as a table of C functions. All but start, world
 * and finish may be called between MPI_Init and MPI_Finalize only. A function that returns int
 * gives 0 or an error that `describe` turns into words. Nothing blocks but start and finish. */
#pragma once

#include <cstdint>

extern "C" {

/* Changes whenever the table does. */
#define MOEKIT_MPI_PLUGIN_VERSION 1

struct moekit_mpi_group; /* a duplicate of a communicator, with its persistent operations */

struct moekit_mpi_plugin {
  uint32_t version;
  /* MPI_Get_library_version, first line. */
  const char* library;
  void (*describe)(int error, char* text, int64_t bytes);

  int (*initialized)(void);           /* 1 between MPI_Init and MPI_Finalize, 0 before, -1 after */
  int (*start)(int* rank, int* size); /* MPI_Init_thread; of the world */
  int (*finish)(void);                /* MPI_Finalize */
  const void* (*world)(void);         /* an MPI_Comm* */

  int (*open)(const void* mpi_comm, struct moekit_mpi_group** group); /* starts MPI_Comm_idup */
  int (*opened)(struct moekit_mpi_group* group, int* done);
  void (*close)(struct moekit_mpi_group* group);
  int (*rank)(const struct moekit_mpi_group* group, int* rank, int* size, int* largest_tag);
  /* MPI_Iallgather, one at a time. */
  int (*allgather)(struct moekit_mpi_group* group, const void* send, void* recv, int64_t bytes);
  int (*gathered)(struct moekit_mpi_group* group, int* done);

  /* Persistent operations of one user of the group. */
  struct moekit_mpi_operations* (*connect)(struct moekit_mpi_group* group);
  /* Sends of a `synchronous` operation end when they are received. */
  int (*add_send)(struct moekit_mpi_operations* operations, int peer, int tag, const void* buffer,
                  int64_t bytes, int synchronous, int* number);
  int (*add_receive)(struct moekit_mpi_operations* operations, int peer, int tag, void* buffer,
                     int64_t bytes, int* number);
  int (*start_operation)(struct moekit_mpi_operations* operations, int number);
  /* MPI_Testsome: the numbers of those that have ended since the last call. */
  int (*poll)(struct moekit_mpi_operations* operations, const int** ended, int* count);
  /* Takes started receives back. Returns how many operations go on, sends and receives whose
     message has come in part: their buffers have to stay. */
  int (*disconnect)(struct moekit_mpi_operations* operations);
};

/* The only symbol of the plug-in; null when it does not speak `version`. */
const struct moekit_mpi_plugin* moekit_mpi_plugin_table(uint32_t version);
typedef const struct moekit_mpi_plugin* (*moekit_mpi_plugin_table_function)(uint32_t version);

} /* extern "C" */
