// The whole path for all ranks at once, in one thread and with nothing clever: what every Reducer must agree with.
#pragma once

#include <algorithm>
#include <cmath>
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
        rule_{options.momentum, options.nesterov, options.error_feedback, options.residual_decay},
        always_dense_(std::move(always_dense)),
        ranks_(static_cast<std::size_t>(ranks)) {
    for (const Parameter& parameter : parameters)
      states_[parameter.name].assign(ranks_, ResidualState(parameter.numel, rule_));
  }

  /// What local clipping multiplies each rank's gradients of the step by: its gradients are those of all buckets.
  std::vector<float> clip_factors(const std::vector<Gradients>& buckets) const {
    std::vector<float> factors(ranks_, 1.0f);
    for (std::size_t r = 0; r < ranks_ && options_.clip_norm > 0; ++r) {
      double squares = 0;
      for (const Gradients& gradients : buckets) {
        double sum = 0;
        for (std::size_t begin = 0; begin < gradients[r].size(); begin += 4096)
          sum += block_sum(
              std::span(gradients[r]).subspan(begin, std::min<std::size_t>(4096, gradients[r].size() - begin)),
              [](float value) { return double(value) * double(value); });
        squares += sum;
      }
      const double limit = double(options_.clip_norm) * std::sqrt(double(ranks_));
      if (std::sqrt(squares) > limit) factors[r] = float(limit / std::sqrt(squares));
    }
    return factors;
  }

  /// One job of step `step`, its gradients clipped already; has_gradient[r][s] says whether rank r has a gradient for
  /// slice s. Returns the mean in f32.
  std::vector<float> reduce(std::uint64_t step, const Bucket& bucket, const Gradients& gradients,
                            const std::vector<std::vector<bool>>& has_gradient) {
    sent_.assign(ranks_, std::vector<float>(numel(bucket), 0.0f));
    const bool dense_step =
        ranks_ == 1 || step < options_.schedule.dense_steps || options_.all_reduce == SparseAllReduce::dense;
    step_ = step;
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
        send_selected({place});
    }
    if (!sparse_places.empty()) send_selected(sparse_places);
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

  double density_of(const Selector& selector) const {
    const Schedule& schedule = options_.schedule;
    const double asked = density(selector);
    if (step_ >= schedule.dense_steps + schedule.ramp_steps) return asked;
    const double stage =
        std::floor(double(step_ - schedule.dense_steps) * schedule.ramp_stages / double(schedule.ramp_steps));
    return float(std::pow(asked, (stage + 1) / (schedule.ramp_stages + 1.0)));
  }

  // Rules are by whole names here; in units of whole buckets there are none.
  Selector selector_of(const std::vector<Place>& unit) const {
    std::size_t numel = 0;
    for (const Place& place : unit) numel += place.numel;
    Selector selector = options_.selector;
    for (const SizedSelector& larger : options_.selector_by_size)
      if (numel > larger.above) selector = larger.selector;
    for (const ParameterRule& rule : options_.rules)
      if (rule.pattern == unit.front().name && rule.selector) selector = *rule.selector;
    std::visit([&](auto& s) { s.density = density_of(selector); }, selector);
    return selector;
  }
  ValueCoding values_of(const std::string& name) const {
    ValueCoding values = options_.codec.values;
    for (const ParameterRule& rule : options_.rules)
      if (rule.pattern == name) values = rule.values.value_or(values);
    return values;
  }

  void send_selected(const std::vector<Place>& unit) {
    const std::string& name = unit.front().name;
    const std::uint32_t seed = unit_seed(options_.seed, step_, name);
    const Selector selector = selector_of(unit);
    const ValueCoding values = values_of(name);
    const Side side = values != ValueCoding::shared_mean ? Side::both : step_ % 2 == 0 ? Side::smallest : Side::largest;
    for (std::size_t r = 0; r < ranks_; ++r) {
      std::vector<UnitSegment> segments;
      for (const Place& place : unit)
        segments.push_back({states_.at(place.name)[r].v.data(), place.numel, place.offset});
      SparseGradient selected = select(selector, segments, seed, side, &memory_[{name, r}]);
      selected.values = received(values, selected.values);
      scatter(selected, sent_[r]);
      for (std::size_t j = 0; j < selected.nnz(); ++j)
        for (const Place& place : unit)
          if (const std::uint32_t index = selected.indices[j];
              index != kEmptySlot && index >= place.offset && index < place.offset + place.numel) {
            ResidualState& state = states_.at(place.name)[r];
            float& v = state.v[index - place.offset];
            v = options_.rounding_feedback ? add(v, -selected.values[j]) : 0.0f;
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
  std::map<std::pair<std::string, std::size_t>, SelectionMemory> memory_;
  std::uint64_t step_ = 0;
  Gradients sent_;
};

}  // namespace thinwire::reference
