// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks a class or function as part of the public C++ interface of `diffulex::core` and
/// `diffulex::kernels`. The libraries are compiled with hidden visibility, so a declaration without
/// this mark cannot be reached through a shared build (`BUILD_SHARED_LIBS=ON`); in a static build
/// the mark changes nothing.
#define DIFFULEX_API __attribute__((visibility("default")))

/// Marks a function of a header that compiles for host and device alike; empty outside CUDA
/// compilation.
#ifdef __CUDACC__
#define DIFFULEX_HOST_DEVICE __host__ __device__
#else
#define DIFFULEX_HOST_DEVICE
#endif
