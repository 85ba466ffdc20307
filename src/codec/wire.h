// Offsets and constants of the wire format (docs/wire_format.md), in bytes, little-endian.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thinwire::wire {

// The 64-byte header.
inline constexpr std::size_t kMagic = 0;          // u32
inline constexpr std::size_t kVersion = 4;        // u8, then one reserved byte
inline constexpr std::size_t kFlags = 6;          // u16
inline constexpr std::size_t kStep = 8;           // u64
inline constexpr std::size_t kJob = 16;           // u32
inline constexpr std::size_t kSlices = 20;        // u32
inline constexpr std::size_t kOptionsHash = 24;   // u64
inline constexpr std::size_t kLayoutHash = 32;    // u64
inline constexpr std::size_t kPayloadBytes = 40;  // u64
inline constexpr std::size_t kBlockBytes = 48;    // u64
inline constexpr std::size_t kNonFinite = 56;     // u32
inline constexpr std::size_t kChecksum = 60;      // u32

inline constexpr std::uint32_t kMagicValue = 0x31574854u;  // "THW1"
inline constexpr std::uint32_t kNone = 0xFFFFFFFFu;

// The header of a section.
inline constexpr std::size_t kKind = 0;          // u8
inline constexpr std::size_t kIndexCoding = 1;   // u8
inline constexpr std::size_t kValueCoding = 2;   // u8
inline constexpr std::size_t kSectionFlags = 3;  // u8
inline constexpr std::size_t kBegin = 4;         // u32
inline constexpr std::size_t kExtent = 8;        // u32
inline constexpr std::size_t kCount = 12;        // u32
inline constexpr std::size_t kHashSeed = 16;     // u32
inline constexpr std::size_t kLowBits = 20;      // u8
inline constexpr std::size_t kExponent = 21;     // i8
inline constexpr std::size_t kReserved = 22;     // u16, u32, u32
inline constexpr std::size_t kSectionHeader = 32;

inline constexpr std::uint8_t kDense = 0;
inline constexpr std::uint8_t kSparse = 1;
inline constexpr std::uint8_t kHashedOrder = 1;

}  // namespace thinwire::wire
