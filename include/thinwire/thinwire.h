// thinwire: the table of contents, in reading order.
//
// Residual gradient compression for data-parallel training on thin networks: send the few entries of each gradient that
// matter, keep the rest in a residual until they do.
#pragma once

#include "thinwire/version.h"

// What can go wrong, and what a gradient looks like.
#include "thinwire/error.h"
#include "thinwire/types.h"

// What is trained and travels together; what was selected of it.
#include "thinwire/parameter.h"
#include "thinwire/sparse_gradient.h"

// The stages a gradient passes, in order; they do not know each other.
#include "thinwire/codec.h"
#include "thinwire/residual.h"
#include "thinwire/select.h"

// How payloads reach the other ranks and become the mean.
#include "thinwire/communicator.h"
#include "thinwire/sparse_all_reduce.h"

// All of it together: begin_step(), then one reduce() per bucket.
#include "thinwire/reducer.h"
#include "thinwire/trace.h"

// Whether it is worth it: what an exchange would take.
#include "thinwire/plan.h"
