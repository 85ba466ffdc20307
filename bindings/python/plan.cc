// The cost model in Python: plain functions over plain numbers; thinwire/plan.py is what users import.
#include "thinwire/plan.h"

#include "bindings.h"

namespace thinwire::python {

using namespace nb::literals;

void bind_plan(nb::module_& m) {
  m.def(
      "sparse_seconds",
      [](int ranks, double dense_bytes, double density, double bytes_per_entry, double latency_seconds,
         double seconds_per_byte, double select_seconds, double decode_seconds) {
        return sparse_seconds(ranks, {dense_bytes, density, bytes_per_entry}, {latency_seconds, seconds_per_byte},
                              {select_seconds, decode_seconds, 0.0});
      },
      "ranks"_a, "dense_bytes"_a, nb::kw_only(), "density"_a = 0.001, "bytes_per_entry"_a = 8.0,
      "latency_seconds"_a = 0.0, "seconds_per_byte"_a, "select_seconds"_a = 0.0, "decode_seconds"_a = 0.0,
      R"(select_seconds + lg(p)*latency_seconds + (p-1)*payload*seconds_per_byte + p*decode_seconds, for p = ranks.

dense_bytes is 4 for each element, payload = density * dense_bytes / 4 * bytes_per_entry what one rank sends to each
other, decode_seconds the time for one rank's payload.)");
  m.def(
      "dense_seconds",
      [](int ranks, double dense_bytes, double latency_seconds, double seconds_per_byte,
         double reduce_seconds_per_byte) {
        return dense_seconds(ranks, dense_bytes, {latency_seconds, seconds_per_byte},
                             {0.0, 0.0, reduce_seconds_per_byte});
      },
      "ranks"_a, "dense_bytes"_a, nb::kw_only(), "latency_seconds"_a = 0.0, "seconds_per_byte"_a,
      "reduce_seconds_per_byte"_a = 0.0,
      "2*lg(p)*latency_seconds + (p-1)/p*dense_bytes*(2*seconds_per_byte + reduce_seconds_per_byte), for p = ranks.");
  m.def("traffic_ratio", &traffic_ratio, "ranks"_a, "density"_a, "bytes_per_entry"_a = 8.0,
        "Bytes sent sparsely / bytes sent densely: ranks * density * bytes_per_entry / 8.");
  m.def("break_even_ranks", &break_even_ranks, "density"_a, "bytes_per_entry"_a = 8.0,
        "The number of ranks at which both ways send the same: 8 / (density * bytes_per_entry).");
  m.def("worth_compressing", nb::overload_cast<double, double, double>(&worth_compressing), "compress_seconds"_a,
        "exchange_seconds"_a, "full_seconds"_a,
        "DRAGONN's rule: compress_seconds + exchange_seconds < full_seconds, the exchange without the compression.");
}

}  // namespace thinwire::python
