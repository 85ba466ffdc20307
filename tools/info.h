// `thinwire info`: what this machine and this build have.
#pragma once

namespace thinwire::tools {

/// Prints to standard output. With `json` as one object.
void print_info(bool json);

}  // namespace thinwire::tools
