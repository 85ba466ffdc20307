// thinwire: a cost model in closed form. What one exchange would take, dense or sparse, before anybody has to try it.
#pragma once

namespace thinwire {

// After RedSync's model (arXiv 1808.04357; JPDC 133, 2019), with p ranks and lg the logarithm to base 2:
//
//     T_sparse = T_select + lg(p)·alpha + (p-1)·B·beta + p·gamma1                     all-gather, recursive doubling
//     T_dense  = 2·lg(p)·alpha + 2·(p-1)/p·M·beta + (p-1)/p·M·gamma2                  reduce-scatter and all-gather
//
// M is the dense message, 4 bytes for each element whatever the gradient's type: the arithmetic is f32. B is the payload of
// one rank, D·M/4 entries of `bytes_per_entry` bytes: D·M where an entry takes no more than a dense element does, 2·D·M
// with an index of 4 bytes beside a value of 4. A Reducer with an exact selector sends (p-1)·B and, for each payload, a
// header, a few bytes a section and padding. Nothing overlaps with anything; lg(p) is not rounded up.
//
// Errors of all functions: invalid_argument naming the argument, if ranks < 1, the density is not in (0, 1], bytes or
// bytes_per_entry are not positive, a time is negative, or anything is infinite or not a number.

/// What one message costs between two ranks.
struct LinkCost {
  double latency_seconds = 0.0;   ///< alpha, for each of the lg(p) rounds
  double seconds_per_byte = 0.0;  ///< beta; 8e-9 at 1 Gbit/s
};

/// What a rank does besides sending.
struct StageCost {
  double select_seconds = 0.0;           ///< T_select: accumulate, select, encode; once in a step
  double decode_seconds = 0.0;           ///< gamma1: adds one rank's payload to the mean; p times in a step
  double reduce_seconds_per_byte = 0.0;  ///< gamma2: the sums inside a dense all-reduce
};

/// What is reduced in one exchange.
struct Message {
  double dense_bytes = 0.0;      ///< M = 4·numel
  double density = 0.001;        ///< D, entries sent / numel
  double bytes_per_entry = 8.0;  ///< 8: raw u32 and f32; 4: an index alone, all values being one
};

/// B = density · dense_bytes / 4 · bytes_per_entry. An all-gather sends (p-1)·B a rank.
double payload_bytes(const Message& message);

/// T_sparse. With one rank: what is left of it without a network, T_select + gamma1.
double sparse_seconds(int ranks, const Message& message, const LinkCost& link, const StageCost& stages = {});

/// T_dense of a message of `dense_bytes`. 0 with one rank.
double dense_seconds(int ranks, double dense_bytes, const LinkCost& link, const StageCost& stages = {});

/// Bytes sent sparsely / bytes sent densely = p·D·bytes_per_entry / 8: p·D with 8 bytes an entry, p·D/2 with 4.
double traffic_ratio(int ranks, double density, double bytes_per_entry = 8.0);

/// The number of ranks at which both ways send the same: 8 / (D·bytes_per_entry). Not an integer in general.
double break_even_ranks(double density, double bytes_per_entry = 8.0);

/// DRAGONN's rule for one tensor (Wang et al., ICML 2022), on times that were measured or modelled: compress iff
/// T_compress + T_sparse < T_full. `exchange_seconds` is T_sparse without the compression, so that nothing counts twice.
bool worth_compressing(double compress_seconds, double exchange_seconds, double full_seconds);

/// The same rule on the model's times: sparse_seconds < dense_seconds.
bool worth_compressing(int ranks, const Message& message, const LinkCost& link, const StageCost& stages = {});

}  // namespace thinwire
