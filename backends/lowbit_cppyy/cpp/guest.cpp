// The program that is emulated: the headers of this folder, kernels in libraries, and requests on standard input.
//
// A request is its kind, 64 bits, and then what that kind needs:
//   0: bytes, to be held; the answer is their address       1: an address, to be given back
//   2: bytes, the path of a library with a kernel; the answer is the address of the kernel
//   3: an address and a number of bytes; the answer is 0, and then the bytes that are held there
//   4 and on: a function and its arguments, 8 bytes for a number and bytes for a pointer; the answer is the result, and
//   then what the function wrote to its pointers.
// Bytes come after their number.
#include <cstdio>
#include <dlfcn.h>
#include <tuple>
#include <type_traits>

#include "blocks.h"
#include "step.h"

template <class T> T next() {
  T value;
  if (std::fread(&value, sizeof value, 1, stdin) != 1) std::exit(0);
  return value;
}

struct Bytes {
  std::size_t size = next<std::int64_t>();
  std::unique_ptr<char[]> data{new char[size]};
  Bytes() {
    if (size && std::fread(data.get(), size, 1, stdin) != 1) std::exit(0);
  }
};

template <class T> struct Argument {
  T value;
  Argument() {
    if constexpr (std::is_floating_point_v<T>) value = static_cast<T>(next<double>());
    else value = static_cast<T>(next<std::int64_t>());
  }
  void answer() const {}
};

template <class T> struct Argument<T*> {
  Bytes bytes;
  T* value = reinterpret_cast<T*>(bytes.data.get());
  void answer() const {
    if (!std::is_const_v<T>) std::fwrite(bytes.data.get(), 1, bytes.size, stdout);
  }
};

void answer(std::int64_t result) { std::fwrite(&result, sizeof result, 1, stdout); }

template <class R, class... Ts> void serve(R (*function)(Ts...)) {
  const std::tuple<Argument<Ts>...> arguments{Argument<Ts>()...};  // read in their order
  std::apply([&](const auto&... each) {
    if constexpr (std::is_void_v<R>) function(each.value...), answer(0);
    else answer(static_cast<std::int64_t>(function(each.value...)));
    (each.answer(), ...);
  }, arguments);
}

std::int64_t load(const char* path) {
  void* const library = dlopen(path, RTLD_NOW);
  if (!library) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
  return reinterpret_cast<std::int64_t (*)()>(dlsym(library, "kernel_address"))();
}

void send_back() {
  const char* const held = reinterpret_cast<const char*>(next<std::int64_t>());
  const std::size_t size = next<std::int64_t>();
  answer(0), std::fwrite(held, 1, size, stdout);
}

int main() {
  using namespace lowbit::bridge;
  for (;;) {
    switch (next<std::int64_t>()) {
      case 0: answer(reinterpret_cast<std::int64_t>(Bytes().data.release())); break;
      case 1: delete[] reinterpret_cast<char*>(next<std::int64_t>()), answer(0); break;
      case 2: answer(load(Bytes().data.get())); break;
      case 3: send_back(); break;
      FUNCTIONS  // a case for each, written by lowbit_cppyy.emulation.guest
      default: return 1;
    }
    std::fflush(stdout);
  }
}
