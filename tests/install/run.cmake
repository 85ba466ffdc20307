# cmake -DTHINWIRE_BINARY_DIR=... -DGENERATOR=... -DCXX=... -P run.cmake
# Installs the built library below a temporary prefix, then configures, builds and runs the stranger's project there.

set(work ${THINWIRE_BINARY_DIR}/install_test)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${THINWIRE_BINARY_DIR} --prefix ${work}/prefix)
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${work}/build -G ${GENERATOR}
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/stranger)

# What was installed must not lead back to the folder it was built in.
file(GLOB_RECURSE installed ${work}/prefix/*.cmake)
foreach(file IN LISTS installed)
  file(STRINGS ${file} lines REGEX "^[^#]*${THINWIRE_BINARY_DIR}/CMake")
  if(lines)
    message(FATAL_ERROR "${file} mentions the build folder: ${lines}")
  endif()
endforeach()
