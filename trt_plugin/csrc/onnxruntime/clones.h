// Marks a function of which the compiler makes a copy for wider vectors; the loader takes the one
// for its CPU. It does so before the thread sanitizer has begun, whose code would be in what it
// calls.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define DYNAMO_MOE_CLONES [[gnu::target_clones("default", "arch=x86-64-v3")]]
#else
#define DYNAMO_MOE_CLONES
#endif
