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
