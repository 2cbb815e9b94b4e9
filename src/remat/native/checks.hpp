// What the functions of the core ask of their arguments before they work, so that inside
// no sum overflows and no index is out of range whatever a caller passes. Each twin asks
// the same. What is refused becomes a ValueError in Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace remat {

// As remat.native has them.
inline constexpr std::int64_t kMostTotal = std::int64_t{1} << 60;
inline constexpr std::int64_t kMostTableBytes = std::int64_t{1} << 33;
inline constexpr double kLargestExponent = 8.0;

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// An integer of at least 0 whose sums and products end at 2**61 instead of overflowing.
class Capped {
 public:
  static constexpr std::int64_t kMost = std::int64_t{1} << 61;

  // Of what must not be negative.
  explicit Capped(std::int64_t value) : value_(std::min(value, kMost)) {
    require(value >= 0, "a number is negative");
  }
  static Capped count(std::size_t value) {
    return Capped(static_cast<std::int64_t>(std::min(value, std::size_t{1} << 61U)));
  }

  [[nodiscard]] std::int64_t value() const { return value_; }
  Capped operator+(Capped other) const {
    return Capped(value_ + other.value_);
  }
  Capped operator*(Capped other) const {
    const bool is_more = other.value_ != 0 && value_ > kMost / other.value_;
    return Capped(is_more ? kMost : value_ * other.value_);
  }
  Capped& operator+=(Capped other) { return *this = *this + other; }
  Capped& operator*=(Capped other) { return *this = *this * other; }

 private:
  std::int64_t value_;
};

inline Capped total(const std::vector<std::int64_t>& numbers) {
  Capped sum(0);
  for (const std::int64_t number : numbers) sum += Capped(number);
  return sum;
}

// Bytes of tables of so many 8-byte numbers.
inline void check_table(Capped numbers) {
  require((numbers * Capped(8)).value() <= kMostTableBytes,
          "the tables would take more than 2**33 bytes");
}

// Whether an index is from `first` to the last of `count` things.
inline bool is_index(std::int64_t index, std::size_t count, std::int64_t first = 0) {
  return index >= first && (index < 0 || static_cast<std::size_t>(index) < count);
}

inline void check_indices(const std::vector<std::int64_t>& indices, std::size_t count,
                          const char* message, std::int64_t first = 0) {
  for (const std::int64_t index : indices) require(is_index(index, count, first), message);
}

inline void check_share(double share) {
  require(share >= 0.0 && share <= 1.0, "a share is not between 0 and 1");
}

inline void check_exponent(double exponent) {
  require(exponent >= 0.0 && exponent <= kLargestExponent,
          "an exponent is not between 0 and 8");
}

}  // namespace remat
