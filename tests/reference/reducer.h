// The whole path for all ranks at once, in one thread and with nothing clever: what every Reducer must agree with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/hash.h"
#include "reference/mean.h"
#include "reference/residual.h"
#include "reference/selection.h"
#include "reference/values.h"
#include "thinwire/reducer.h"

namespace thinwire::reference {

class Reducer {
 public:
  using Gradients = std::vector<std::vector<float>>;  ///< [ranks][numel of the bucket]

  /// `always_dense` are the parameters that the options keep dense.
  Reducer(const ReducerOptions& options, const std::vector<Parameter>& parameters, std::set<std::string> always_dense,
          int ranks)
      : options_(options),
        rule_{options.momentum, options.nesterov, options.error_feedback},
        always_dense_(std::move(always_dense)),
        ranks_(static_cast<std::size_t>(ranks)) {
    for (const Parameter& parameter : parameters)
      states_[parameter.name].assign(ranks_, ResidualState(parameter.numel, rule_));
  }

  /// One job of step `step`; has_gradient[r][s] says whether rank r has a gradient for slice s. Returns the mean in f32.
  std::vector<float> reduce(std::uint64_t step, const Bucket& bucket, const Gradients& gradients,
                            const std::vector<std::vector<bool>>& has_gradient) {
    sent_.assign(ranks_, std::vector<float>(numel(bucket), 0.0f));
    const bool dense_step =
        ranks_ == 1 || step < options_.schedule.dense_steps || options_.all_reduce == SparseAllReduce::dense;
    std::vector<Place> sparse_places;
    std::size_t offset = 0;
    for (std::size_t s = 0; s < bucket.slices.size(); offset += bucket.slices[s++].numel) {
      const BucketSlice& slice = bucket.slices[s];
      bool somewhere = false;
      for (std::size_t r = 0; r < ranks_; ++r) somewhere = somewhere || has_gradient[r][s];
      if (!somewhere) continue;
      for (std::size_t r = 0; r < ranks_; ++r)
        accumulate(states_.at(slice.name)[r], rule_, std::span(gradients[r]).subspan(offset, slice.numel));
      unsent_[slice.name] = states_.at(slice.name);
      const Place place{slice.name, slice.numel, static_cast<std::uint32_t>(offset)};
      if (dense_step || always_dense_.contains(slice.name))
        send_dense(place);
      else if (options_.unit == Unit::bucket)
        sparse_places.push_back(place);
      else
        send_selected({place}, unit_seed(options_.seed, step, slice.name));
    }
    if (!sparse_places.empty())
      send_selected(sparse_places, unit_seed(options_.seed, step, sparse_places.front().name));
    return mean(sent_);
  }

  /// A step ends with one of these: its sends are final, or taken back while its gradients stay.
  void commit() { unsent_.clear(); }
  void undo() {
    for (auto& [name, states] : unsent_) states_.at(name) = states;
    commit();
  }

  const ResidualState& state(const std::string& name, int rank) const {
    return states_.at(name)[static_cast<std::size_t>(rank)];
  }

 private:
  struct Place {
    std::string name;
    std::size_t numel;
    std::uint32_t offset;
  };

  void send_dense(const Place& place) {
    for (std::size_t r = 0; r < ranks_; ++r) {
      std::vector<float>& v = states_.at(place.name)[r].v;
      std::copy(v.begin(), v.end(), sent_[r].begin() + place.offset);
      std::fill(v.begin(), v.end(), 0.0f);
    }
  }

  void send_selected(const std::vector<Place>& unit, std::uint32_t seed) {
    for (std::size_t r = 0; r < ranks_; ++r) {
      std::vector<UnitSegment> segments;
      for (const Place& place : unit)
        segments.push_back({states_.at(place.name)[r].v.data(), place.numel, place.offset});
      SparseGradient selected = select(options_.selector, segments, seed);
      selected.values = received(options_.codec.values, selected.values);
      scatter(selected, sent_[r]);
      for (std::size_t j = 0; j < selected.nnz(); ++j)
        for (const Place& place : unit)
          if (const std::uint32_t index = selected.indices[j];
              index != kEmptySlot && index >= place.offset && index < place.offset + place.numel) {
            ResidualState& state = states_.at(place.name)[r];
            float& v = state.v[index - place.offset];
            v = add(v, -selected.values[j]);
            if (options_.momentum_masking && !state.u.empty()) state.u[index - place.offset] = 0;
          }
    }
  }

  ReducerOptions options_;
  MomentumRule rule_;
  std::set<std::string> always_dense_;
  std::size_t ranks_;
  std::map<std::string, std::vector<ResidualState>> states_;  ///< [name][rank]
  std::map<std::string, std::vector<ResidualState>> unsent_;  ///< as the step's gradients alone leave them
  Gradients sent_;
};

}  // namespace thinwire::reference
