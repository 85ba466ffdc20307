// thinwire: the version, stated once. CMake and pyproject.toml read it from here.
#pragma once

#define THINWIRE_VERSION_MAJOR 0
#define THINWIRE_VERSION_MINOR 1
#define THINWIRE_VERSION_PATCH 0
