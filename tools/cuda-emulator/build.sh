#!/bin/sh
# build.sh FOLDER: builds the stand-in driver into FOLDER (libcuda.so, libnvrtc.so, libcublasLt.so, libnccl.so.2, device/, modules/).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cp -r "$here/device" "$1"
flags="-std=c++17 -O2 -Wall -Wextra -fPIC -shared"
c++ $flags -pthread "$here/cpp/memory.cpp" "$here/cpp/fiber.cpp" "$here/cpp/workers.cpp" \
    "$here/cpp/seed.cpp" "$here/cpp/execute.cpp" "$here/cpp/driver.cpp" \
    "$here/cpp/streams.cpp" "$here/cpp/allocations.cpp" \
    -Wl,-soname,libcuda.so -Wl,-Bsymbolic-functions -o "$1/libcuda.so" -ldl
c++ $flags "$here/cpp/blas.cpp" -Wl,-soname,libcublasLt.so -Wl,-rpath,'$ORIGIN' -L"$1" -lcuda -o "$1/libcublasLt.so"
c++ $flags "$here/cpp/nccl.cpp" -Wl,-soname,libnccl.so.2 -Wl,-rpath,'$ORIGIN' -L"$1" -lcuda -o "$1/libnccl.so.2"
c++ $flags "$here/cpp/nvrtc.cpp" -Wl,-soname,libnvrtc.so -o "$1/libnvrtc.so" -ldl
