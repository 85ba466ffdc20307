// Memory of the residuals: aligned to cache lines, and where it is large, in huge pages if the system has them, because
// single entries are read and written all over it.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace thinwire {

template <class T>
struct ArrayAllocator {
  using value_type = T;

  static constexpr std::size_t kCacheLine = 64;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static std::align_val_t alignment(std::size_t bytes) noexcept {
    return std::align_val_t(bytes >= 2 * kHugePage ? kHugePage : kCacheLine);
  }

  ArrayAllocator() = default;
  template <class U>
  ArrayAllocator(const ArrayAllocator<U>&) noexcept {}  // NOLINT(google-explicit-constructor): as allocators convert

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    void* memory = ::operator new(bytes, alignment(bytes));
#ifdef __linux__
    if (bytes >= 2 * kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: refused, nothing is lost
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept { ::operator delete(memory, alignment(count * sizeof(T))); }

  friend bool operator==(const ArrayAllocator&, const ArrayAllocator&) = default;
};

using FloatArray = std::vector<float, ArrayAllocator<float>>;

}  // namespace thinwire
