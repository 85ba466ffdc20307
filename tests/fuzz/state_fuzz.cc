// reducer.h, load: a state is refused with nothing changed, or is what the reducer has from then on; and then steps go on
// as ever: the same bits on every rank, residuals finite, and what the ranks gave is what was sent and what stays.
//
// A case: ranks, options, model, steps before, the state, steps after.
#include <limits>
#include <memory>

#include "model.h"

namespace thinwire::fuzz {
namespace {

class Ranks {
 public:
  Ranks(const ReducerOptions& options, const std::vector<Parameter>& parameters, int ranks)
      : parameters_(parameters), communicators_(make_thread_communicators(ranks, std::chrono::seconds(20))) {
    for (const auto& communicator : communicators_)
      reducers_.push_back(std::make_unique<Reducer>(options, parameters, *communicator));
  }

  std::size_t size() const { return reducers_.size(); }
  Reducer& operator[](std::size_t rank) { return *reducers_[rank]; }

  /// One step of one bucket, checked.
  void step(Input& input) {
    const std::uint32_t kind = input.below(8);
    const StepMode mode = kind == 6 ? StepMode::dense : kind == 7 ? StepMode::flush : StepMode::scheduled;
    std::vector<Bucket> buckets;
    std::vector<std::vector<float>> gradients;
    std::vector<std::vector<ParameterState>> before;
    std::vector<Work> works;
    bool whole = true;
    for (std::size_t r = 0; r < size(); ++r) {
      buckets.push_back(bucket_of(parameters_, input));
      gradients.push_back(take_gradient(buckets[r], input));
      before.push_back(reducers_[r]->state().parameters);
      for (const BucketSlice& slice : buckets[r].slices) whole = whole && slice.has_gradient;
    }
    std::vector<std::vector<float>> means = gradients;
    for (const auto& reducer : reducers_) reducer->begin_step(mode);
    for (std::size_t r = 0; r < size(); ++r)
      works.push_back(reducers_[r]->reduce(buckets[r], {means[r].data(), means[r].size()}));
    for (Work& work : works) work.wait();
    bool undone = false;
    for (std::size_t r = 0; r < size(); ++r) {
      expect(same(means[r], means[0]), "every rank has the same bits");
      const bool non_finite = reducers_[r]->stats().non_finite;
      expect(r == 0 || non_finite == undone, "every rank knows of an entry that is not finite");
      undone = non_finite;
      expect_finite(reducers_[r]->state().parameters);
    }
    if (whole && mode != StepMode::flush) check_sums(before, gradients, means[0], undone);
  }

 private:
  void check_sums(std::vector<std::vector<ParameterState>> states, std::vector<std::vector<float>> gradients,
                  const std::vector<float>& mean, bool undone) {
    for (std::size_t r = 0; r < size(); ++r) {
      const auto clipped = static_cast<float>(reducers_[r]->stats().clip_factor);
      for (float& value : gradients[r]) value *= clipped;
      states[r] = accumulated(states[r], reducers_[r]->options(), gradients[r]);
    }
    if (undone) {
      for (std::size_t r = 0; r < size(); ++r)
        expect(same_states(reducers_[r]->state().parameters, states[r]), "a skipped step leaves what came, all of it");
      return;
    }
    const ReducerOptions& options = reducers_[0]->options();
    if (!options.error_feedback || !options.rounding_feedback) return;
    std::vector<double> left(mean.size(), 0.0);  // what came and is neither sent nor kept
    double largest = 0;
    for (std::size_t r = 0; r < size(); ++r) {
      const std::vector<ParameterState> after = reducers_[r]->state().parameters;
      std::size_t at = 0;
      for (std::size_t p = 0; p < after.size(); ++p)
        for (std::size_t i = 0; i < after[p].residual.size(); ++i, ++at) {
          left[at] += double{states[r][p].residual[i]} - double{after[p].residual[i]};
          largest = std::max(largest, std::fabs(double{states[r][p].residual[i]}));
        }
    }
    for (std::size_t i = 0; i < mean.size(); ++i)
      if (std::isfinite(mean[i]))  // a sum of large numbers may overflow
        expect(std::fabs(left[i] - static_cast<double>(size()) * double{mean[i]}) <= 1e-6 * largest + 1e-44,
               "what came is sent or kept");
  }

  std::vector<Parameter> parameters_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<Reducer>> reducers_;
};

void disturb(std::vector<float>& values, Input& input) {
  switch (input.below(6)) {
    case 0:
      values.push_back(input.value());
      break;
    case 1:
      if (!values.empty()) values.pop_back();
      break;
    case 2:
      if (!values.empty()) values[input.below(static_cast<std::uint32_t>(values.size()))] = input.value();
      break;
    case 3:
      for (float& value : values) value = input.value();
      break;
    case 4:
      values.clear();
      break;
    default:
      break;
  }
}

ReducerState disturbed(ReducerState state, Input& input) {
  if (input.chance()) state.step = input.take<std::uint64_t>();
  for (std::uint32_t changes = input.below(4); changes > 0 && !state.parameters.empty(); --changes) {
    const auto at = input.below(static_cast<std::uint32_t>(state.parameters.size()));
    ParameterState& one = state.parameters[at];
    switch (input.below(6)) {
      case 0:
        one.name = input.text(3);
        break;
      case 1:
        state.parameters.push_back(ParameterState(one));
        break;
      case 2:
        state.parameters.erase(state.parameters.begin() + at);
        break;
      case 3:
        disturb(one.velocity, input);
        break;
      default:
        disturb(one.residual, input);
        break;
    }
  }
  for (std::uint32_t changes = input.below(4); changes > 0; --changes) {
    const std::string unit = input.chance() ? std::string(1, static_cast<char>('a' + input.below(4))) : input.text(2);
    SelectionMemory memory{.ratio = input.below(256) / 255.0, .uses = input.below(6)};
    if (input.below(4) == 0) memory = {.ratio = input.take<double>(), .uses = input.take<std::uint32_t>()};
    state.selections[unit] = memory;
  }
  return state;
}

bool same_state(const ReducerState& a, const ReducerState& b) {
  const auto same_memory = [](const auto& x, const auto& y) {
    return x.first == y.first && x.second.ratio == y.second.ratio && x.second.uses == y.second.uses;
  };
  return a.step == b.step && same_states(a.parameters, b.parameters) &&
         std::ranges::equal(a.selections, b.selections, same_memory);
}

void load(Reducer& reducer, Input& input) {
  const ReducerState before = reducer.state();
  ReducerState given = disturbed(before, input);
  try {
    reducer.load(given);
  } catch (const Error& error) {
    expect(error.code() == ErrorCode::invalid_argument, error.what());
    expect(same_state(reducer.state(), before), "a state that is refused changes nothing");
    return;
  }
  std::erase_if(given.selections, [](const auto& unit) { return unit.second.uses == 0; });
  std::vector<ParameterState> ordered;  // as the reducer has them
  for (const ParameterState& known : before.parameters)
    ordered.push_back(
        *std::ranges::find_if(given.parameters, [&](const ParameterState& p) { return p.name == known.name; }));
  given.parameters = ordered;
  expect(same_state(reducer.state(), given), "a state that is taken is the reducer's state");
  expect_finite(given.parameters);
}

}  // namespace
}  // namespace thinwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace thinwire;
  fuzz::Input input(data, size);
  const int count = 1 + static_cast<int>(input.below(2));
  const ReducerOptions options = fuzz::take_options(input);
  const std::vector<Parameter> parameters = fuzz::take_parameters(input);
  try {
    fuzz::Ranks ranks(options, parameters, count);
    for (std::uint32_t steps = input.below(3); steps > 0; --steps) ranks.step(input);
    for (std::size_t r = 0; r < ranks.size(); ++r) fuzz::load(ranks[r], input);
    for (std::size_t r = 1; r < ranks.size(); ++r) {  // ranks go on together
      ReducerState state = ranks[r].state();
      state.step = ranks[0].state().step;
      ranks[r].load(state);
    }
    for (std::uint32_t steps = 1 + input.below(2); steps > 0; --steps) ranks.step(input);
  } catch (const Error& error) {
    fuzz::expect(error.code() == ErrorCode::invalid_argument, error.what());
  }
  return 0;
}
