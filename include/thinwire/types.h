// thinwire: what a gradient in memory looks like. The tags follow DLPack's; nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thinwire {

/// Element types of gradients. Residuals and all arithmetic are f32 whatever the gradient's type.
enum class DType : std::uint8_t { f32, f16, bf16 };

/// "f32", "f16", "bf16".
const char* to_string(DType dtype) noexcept;
/// Bytes of one element: 4, 2, 2.
std::size_t size_of(DType dtype) noexcept;

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// A flat, contiguous, writable gradient buffer [numel] that somebody else owns.
struct GradientView {
  void* data = nullptr;
  std::size_t numel = 0;  ///< elements, not bytes; below 2^32
  DType dtype = DType::f32;
  Device device = {};
  /// A power of two: the buffer holds the gradient times it, and is given the mean times it. What is kept in between,
  /// residuals, norms and clip limits, is in true units, so it may change from step to step.
  float loss_scale = 1.0f;
  float clip = 1.0f;  ///< local clipping: what the true gradient is multiplied by when it is read
};

}  // namespace thinwire
