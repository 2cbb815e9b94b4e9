// Random masks of the CPU, drawn as PyTorch draws them; its own kernel is the twin.
//
// PyTorch's generator of the CPU is a Mersenne twister (Matsumoto, Nishimura 1998) that
// gives one word at a time. Here 624 words are made in one loop, which the processor's
// vector units can do. Each element takes two words, as a 64-bit number whose lower 53
// bits are compared with the share that is kept.

#include "random_masks.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace remat {
namespace {

constexpr std::size_t word_count = 624;
constexpr std::size_t shift = 397;
constexpr int fraction_bits = 53;

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The beginning of what torch.get_rng_state returns (CPUGeneratorImplStateLegacy).
struct State {
  std::uint64_t initial_seed;
  std::int32_t left;
  std::int32_t is_seeded;
  std::uint64_t next;
  std::array<std::uint64_t, word_count> words;
};
static_assert(sizeof(State) == 24 + 8 * word_count);

// The loops below are compiled twice, and the processor's abilities choose, where the
// loader can. Not with the address sanitizer, which is not ready yet when it asks.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define REMAT_WITH_AVX2 __attribute__((target_clones("avx2", "default")))
#else
#define REMAT_WITH_AVX2
#endif

inline std::uint32_t twisted(std::uint32_t far, std::uint32_t upper, std::uint32_t lower) {
  const std::uint32_t mixed = (upper & 0x80000000U) | (lower & 0x7fffffffU);
  return far ^ (mixed >> 1U) ^ ((0U - (lower & 1U)) & 0x9908b0dfU);
}

REMAT_WITH_AVX2 void renew_words(std::uint32_t* words) {
  for (std::size_t i = 0; i < word_count - shift; ++i) {
    words[i] = twisted(words[i + shift], words[i], words[i + 1]);
  }
  for (std::size_t i = word_count - shift; i < word_count - 1; ++i) {
    words[i] = twisted(words[i + shift - word_count], words[i], words[i + 1]);
  }
  words[word_count - 1] = twisted(words[shift - 1], words[word_count - 1], words[0]);
}

REMAT_WITH_AVX2 void temper(const std::uint32_t* words, std::uint32_t* tempered) {
  for (std::size_t i = 0; i < word_count; ++i) {
    std::uint32_t y = words[i];
    y ^= y >> 11U;
    y ^= (y << 7U) & 0x9d2c5680U;
    y ^= (y << 15U) & 0xefc60000U;
    tempered[i] = y ^ (y >> 18U);
  }
}

inline std::uint8_t is_below(std::uint32_t high, std::uint32_t low,
                             std::uint64_t threshold) {
  const std::uint64_t number = (std::uint64_t{high} << 32U) | low;
  return (number & ((std::uint64_t{1} << fraction_bits) - 1)) < threshold;
}

REMAT_WITH_AVX2 void compare(const std::uint32_t* pairs, std::size_t count,
                             std::uint64_t threshold, std::uint8_t* mask) {
  for (std::size_t i = 0; i < count; ++i) {
    mask[i] = is_below(pairs[2 * i], pairs[2 * i + 1], threshold);
  }
}

class Twister {
 public:
  explicit Twister(const State& state) {
    if (state.left < 1 || state.next > word_count ||
        static_cast<std::uint64_t>(state.left) - 1 > word_count - state.next) {
      throw std::invalid_argument("this is no state of PyTorch's generator of the CPU");
    }
    std::transform(state.words.begin(), state.words.end(), words_.begin(),
                   [](std::uint64_t word) { return static_cast<std::uint32_t>(word); });
    next_ = static_cast<std::size_t>(state.next);
    left_ = static_cast<std::size_t>(state.left) - 1;
    temper(words_.data(), tempered_.data());
  }

  void write(State& state) const {
    std::copy(words_.begin(), words_.end(), state.words.begin());
    state.next = next_;
    state.left = static_cast<std::int32_t>(left_) + 1;
  }

  void fill(std::uint8_t* mask, std::size_t count, std::uint64_t threshold) {
    std::size_t done = 0;
    while (done < count) {
      if (left_ < 2) {
        // The two words are of two rounds.
        const std::uint32_t high = word();
        mask[done++] = is_below(high, word(), threshold);
        continue;
      }
      const std::size_t now = std::min(count - done, left_ / 2);
      compare(tempered_.data() + next_, now, threshold, mask + done);
      done += now;
      next_ += 2 * now;
      left_ -= 2 * now;
    }
  }

 private:
  std::uint32_t word() {
    if (left_ == 0) {
      renew();
    }
    --left_;
    return tempered_[next_++];
  }

  void renew() {
    renew_words(words_.data());
    temper(words_.data(), tempered_.data());
    next_ = 0;
    left_ = word_count;
  }

  std::array<std::uint32_t, word_count> words_{};
  std::array<std::uint32_t, word_count> tempered_{};
  std::size_t next_ = 0;
  // Words of this round that have not been given.
  std::size_t left_ = 0;
};

void draw_mask(const Bytes& state_bytes, const Bytes& mask, double keep) {
  if (!(keep >= 0.0 && keep <= 1.0)) {
    throw std::invalid_argument("the share that is kept must lie between 0 and 1");
  }
  if (state_bytes.size() < sizeof(State)) {
    throw std::invalid_argument("this is no state of PyTorch's generator of the CPU");
  }
  // Exact: a power of two. The numbers below `keep` are those below its ceiling.
  const auto threshold =
      static_cast<std::uint64_t>(std::ceil(std::ldexp(keep, fraction_bits)));
  State state{};
  std::memcpy(&state, state_bytes.data(), sizeof(State));
  Twister twister(state);
  twister.fill(mask.data(), mask.size(), threshold);
  twister.write(state);
  std::memcpy(state_bytes.data(), &state, sizeof(State));
}

}  // namespace

void bind_random_masks(nb::module_& module) {
  // With the interpreter's lock: no other thread draws before the state is put back.
  module.def("draw_mask", &draw_mask, nb::arg("state").noconvert(),
             nb::arg("mask").noconvert(), nb::arg("keep"));
}

}  // namespace remat
