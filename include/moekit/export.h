// MOEKIT_API marks what libmoekit.so exports; everything else is compiled with hidden visibility.
#pragma once

#if defined(__GNUC__)
#define MOEKIT_API __attribute__((visibility("default")))
#else
#define MOEKIT_API
#endif
