# thinwire_flags: how thinwire's own sources are compiled. Never exported, never seen by users of the library.

add_library(thinwire_flags INTERFACE)

# The same bits on every rank, compiler and SIMD target: a multiply and an add stay two roundings.
target_compile_options(thinwire_flags INTERFACE -ffp-contract=off)

target_compile_options(thinwire_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(thinwire_flags INTERFACE -Wno-restrict)  # GCC bug 105651: false alarm on std::string's operator+
endif()
if(THINWIRE_WERROR)
  target_compile_options(thinwire_flags INTERFACE -Werror)
endif()

if(THINWIRE_SANITIZE)
  set(sanitize_flags -fsanitize=${THINWIRE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # For everything of this build, so that no unsanitized object hides an access.
  add_compile_options(${sanitize_flags})
  add_link_options(${sanitize_flags})
endif()

if(THINWIRE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "THINWIRE_FUZZ needs Clang, not ${CMAKE_CXX_COMPILER_ID}: configure with -DCMAKE_CXX_COMPILER=clang++ or the preset fuzz.")
  endif()
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -fsanitize=fuzzer)
  check_cxx_source_compiles("extern \"C\" int LLVMFuzzerTestOneInput(const unsigned char*, decltype(sizeof 0)) { return 0; }"
    THINWIRE_HAS_LIBFUZZER)
  unset(CMAKE_REQUIRED_FLAGS)
  if(NOT THINWIRE_HAS_LIBFUZZER)
    message(FATAL_ERROR "THINWIRE_FUZZ is ON but ${CMAKE_CXX_COMPILER} has no libFuzzer; on Debian and Ubuntu install libclang-rt-dev.")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
  # The other SIMD targets give the same bits, as the tests show, and Clang would take minutes to compile them all.
  add_compile_definitions(HWY_COMPILE_ONLY_STATIC)
endif()
