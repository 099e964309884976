// The operations of the generated steps of decoders (step/source.py), on the rows of a call; each is divided between
// the threads of a team.
//
// A step runs in all threads of a team at the same time (`Pool::together`). An operation gives each thread its part of
// the work, and `Team::wait` separates an operation that writes a value from one that reads parts which other threads
// wrote. Every thread computes cheap values for itself, which saves a wait. Results depend neither on the number of
// threads nor on what a thread does: a part is computed as the operation alone computes it.
#pragma once

#include "cache.h"
#include "embedding.h"
#include "fences.h"
#include "routing.h"
#include "sampling.h"

namespace lowbit {

// Threads that wait for one another.
class Barrier {
 public:
  void wait(int threads) {
    const std::uint32_t round = round_.load(std::memory_order_acquire);
    if (came_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      came_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    // A waiting thread yields its time to a thread that cannot run because others use its processor.
    while (!watch(patience, [&] { return round_.load(std::memory_order_acquire) != round; })) std::this_thread::yield();
  }

 private:
  static constexpr std::chrono::microseconds patience{50};
  alignas(64) std::atomic<int> came_{0};
  alignas(64) std::atomic<std::uint32_t> round_{0};
};

// Adds up the seconds that one thread spends in each part of a step, and in waiting after it. Only steps that are
// generated to be timed have one.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), last_(std::chrono::steady_clock::now()) {}
  void lap(int part) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* const seconds_;
  std::chrono::steady_clock::time_point last_;
};

// A matrix with the kernel that multiplies by it (runtime/products.py).
struct Product {
  const Linear* linear;
  const Route* route;
  const StoredRoute* stored;  // of a matrix stored in a format; nullptr for one in codes, scales and zeros
  std::int64_t cast;          // of the activations of a stored matrix: one of Cast, or -1 for none
  std::int64_t layout;        // equal if activations have the same layout
  std::int64_t bytes;         // that one call reads

  std::int64_t rows() const { return linear->shape.rows; }
  std::int64_t columns() const { return linear->columns; }
  bool blocks() const { return !stored && route->layout == MANTISSAS; }

  // Tiles: the columns that a kernel computes at once, of one panel after another.
  std::int64_t tiles_each() const { return (linear->panel + route->columns - 1) / route->columns; }
  std::int64_t tiles() const {
    const std::int64_t whole = linear->columns / linear->panel, rest = linear->columns % linear->panel;
    return whole * tiles_each() + (rest + route->columns - 1) / route->columns;
  }
  // The tile that begins at a column, or the number of tiles at the end of the matrix.
  std::int64_t tile_from(std::int64_t column) const {
    return column >= linear->columns ? tiles() : column / linear->panel * tiles_each() + column % linear->panel / route->columns;
  }
  std::int64_t tile_start(std::int64_t tile) const {
    return std::min(tile / tiles_each() * linear->panel + tile % tiles_each() * route->columns, linear->columns);
  }

  // Bytes of memory for laying out `rows` rows of x, and for what a row is cast to.
  std::int64_t laid_out_bytes(std::int64_t count) const {
    return whole_blocks(count, *route) * route->x_length * static_cast<std::int64_t>(sizeof(float)) + 64;
  }
  std::int64_t cast_bytes() const { return route->rows * (rows() * 8 + 64); }
};

// Lays out `count` rows of x, at most as many as a kernel computes at once. `room` has `cast_bytes`. Statuses are those
// of casts.
inline int lay_rows(const Product& product, const float* x, std::int64_t count, void* room, float* to) {
  const Groups& shape = product.linear->shape;
  const Route& route = *product.route;
  const std::int64_t K = shape.rows;
  if (!product.stored && !product.blocks()) {
    lay_floats(shape, route, x, count, to);
    return OK;
  }
  if (product.blocks()) {
    const std::int64_t blocks = (K + activation_block - 1) / activation_block;
    std::int16_t* const exponents = static_cast<std::int16_t*>(room);
    std::int8_t* const mantissas = reinterpret_cast<std::int8_t*>(exponents + count * blocks);
    for (std::int64_t t = 0; t < count; ++t)
      if (!cast_blocks(x + t * K, K, mantissas + t * K, exponents + t * blocks)) return NOT_FINITE;
    lay_mantissas(shape, route, mantissas, exponents, count, blocks, to);
    return OK;
  }
  if (product.cast < 0) {
    const float* rows = x;
    if (product.stored->ordered) {
      float* const copy = static_cast<float*>(room);
      for (std::int64_t t = 0; t < count; ++t)
        for (std::int64_t k = 0; k < K; ++k) copy[t * K + k] = x[t * K + product.stored->order[k]];
      rows = copy;
    }
    lay_stored(*product.linear, *product.stored, rows, count, to);
    return OK;
  }
  const Cast cast = static_cast<Cast>(product.cast);
  const std::int64_t block = block_of(cast, K), parts = K / block;
  const StoredRoute& own = *product.stored;
  float *const rows = static_cast<float*>(room), *const scales = rows + (own.integer ? 0 : count * K);
  std::int8_t* const codes = reinterpret_cast<std::int8_t*>(scales + count * parts);
  for (std::int64_t t = 0; t < count; ++t) {
    const int status = cast_row(cast, FLOAT32, x + t * K, K, codes + t * K, scales + t * parts);
    if (status != OK) return status;
  }
  if (own.integer) {
    lay_stored_bytes(*product.linear, own, codes, scales, block, count, to);
  } else {
    widen_bytes(own, K, codes, scales, block, count, rows);
    lay_stored(*product.linear, own, rows, count, to);
  }
  return OK;
}

// The memory in which a thread chooses experts. It is allocated before the threads begin, because an allocation that
// fails in one of them would leave the others waiting.
struct Choosing {
  std::vector<double> wide;
  std::vector<float> scores, weights;
  std::vector<std::int64_t> chosen, order;
  // The experts of one token in ascending order, or the tokens of one expert, and their weights.
  std::vector<std::int64_t> numbers;
  std::vector<float> factors;

  void make(std::int64_t experts, std::int64_t top_k, std::int64_t tokens) {
    wide.resize(experts), scores.resize(experts);
    weights.resize(top_k), chosen.resize(top_k), order.resize(top_k);
    numbers.reserve(tokens * top_k), factors.reserve(tokens * top_k);
  }
};

// One of the threads of a step.
struct Team {
  int thread, threads;
  Barrier* barrier;
  std::atomic<int>* failure;
  float *rotation, *row;  // memory of this thread alone: for rotations, for a normed row,
  char* own;              // and for what is laid out, or for heads that attend
  float* shared;          // laid-out activations of several rows
  std::int64_t tokens;
  Choosing* choosing;

  void wait() const {
    if (threads > 1) barrier->wait(threads);
  }
  // Failures are handled at the end of the step, so that all threads do the same until then. The first failure is
  // reported; others may be its consequences.
  void fail(int status) const {
    int none = OK;
    failure->compare_exchange_strong(none, status, std::memory_order_relaxed);
  }

  std::int64_t first(std::int64_t count) const { return count * thread / threads; }
  std::int64_t last(std::int64_t count) const { return count * (thread + 1) / threads; }
};

// This thread's part of the tiles of several matrices; the cost of a tile is its bytes.
struct Share {
  std::int64_t first, last;
};

inline std::int64_t tile_of(double point, double before, double cost, std::int64_t tiles) {
  return std::min(tiles, std::max<std::int64_t>(0, static_cast<std::int64_t>(std::ceil((point - before) / cost - 0.5))));
}

template <int Count> void share_tiles(const Team& team, const Product* const (&products)[Count], Share (&shares)[Count]) {
  double costs[Count], all = 0, before = 0;
  for (int n = 0; n < Count; ++n) {
    costs[n] = static_cast<double>(products[n]->bytes) / static_cast<double>(products[n]->tiles());
    all += static_cast<double>(products[n]->bytes);
  }
  const double begin = all * team.thread / team.threads, end = all * (team.thread + 1) / team.threads;
  for (int n = 0; n < Count; ++n) {
    const std::int64_t tiles = products[n]->tiles();
    shares[n].first = team.thread == 0 ? 0 : tile_of(begin, before, costs[n], tiles);
    shares[n].last = team.thread + 1 == team.threads ? tiles : tile_of(end, before, costs[n], tiles);
    before += static_cast<double>(products[n]->bytes);
  }
}

// The same columns of two matrices of one size, with panels of one size: whole panels if their tiles differ.
inline void share_pair(const Team& team, const Product& a, const Product& b, Share (&shares)[2]) {
  const Product* const pair[] = {&a, &b};
  const std::int64_t each = a.route->columns == b.route->columns ? 1 : a.tiles_each(), units = (a.tiles() + each - 1) / each;
  const std::int64_t first = a.tile_start(team.first(units) * each), last = a.tile_start(team.last(units) * each);
  for (int n = 0; n < 2; ++n) shares[n] = {pair[n]->tile_from(first), pair[n]->tile_from(last)};
}

// The same columns of every matrix of one size, with panels of one size, however wide its tiles are.
inline Share share_panels(const Team& team, const Product& product) {
  const std::int64_t each = product.tiles_each(), panels = (product.tiles() + each - 1) / each;
  return {std::min(product.tiles(), team.first(panels) * each), std::min(product.tiles(), team.last(panels) * each)};
}

// How threads divide the columns of matrices: by the bytes that each has to read; both matrices of a pair in the same
// way; or by whole panels, so that matrices of other calls are divided in the same way.
enum class Division { bytes, pair, panels };

// The tiles of a share: `rows` rows of laid-out x, to `out`, a row of which is as long as the matrix has columns.
inline void compute_tiles(const Product& product, const float* laid_out, std::int64_t rows, Share share, float* out) {
  const Linear& linear = *product.linear;
  const Route& route = *product.route;
  const bool whole = rows * route.x_length * static_cast<std::int64_t>(sizeof(float)) <= cached_bytes;
  const std::int64_t step = whole ? linear.blocks : 1, each = product.tiles_each();
  for (std::int64_t block = 0; block < linear.blocks; block += step) {
    const Job job{&linear, &route, laid_out, out, rows, block, block + step};
    for (std::int64_t tile = share.first; tile < share.last;) {
      const std::int64_t panel = tile / each, end = std::min(share.last, (panel + 1) * each), start = panel * linear.panel;
      const std::int64_t from = tile % each * route.columns;
      compute_columns(job, panel, from, std::min(product.tile_start(end), start + linear.panel) - start);
      tile = end;
    }
  }
}

// Whether threads divide the rows of a product rather than its columns. With this many tokens every thread has whole
// tiles of rows, and the rows that it lays out stay in its own cache. With fewer tokens the bytes of the matrix
// dominate, which are then read once.
inline bool divides_rows(std::int64_t tokens, int threads) { return tokens >= 2 * max_rows * threads; }

// What `multiply_all` does if threads divide the rows: each lays out `own_rows` of its own rows at a time, and
// multiplies them by all columns. The results of a panel of a pair are used at once, while they are in a cache.
template <Division How, int Count, class Done>
void multiply_rows(const Team& team, const Product* const (&products)[Count], const float* x, float* const (&outs)[Count],
                   const Done& done) {
  const std::int64_t K = products[0]->rows(), tile = products[0]->route->rows, tiles = (team.tokens + tile - 1) / tile;
  const std::int64_t last = std::min(team.tokens, team.last(tiles) * tile), step = own_rows / tile * tile;
  float* const laid_out = reinterpret_cast<float*>(team.own);
  for (std::int64_t t = team.first(tiles) * tile; t < last; t += step) {
    const std::int64_t rows = std::min(last - t, step);
    const auto lay = [&](const Product& product) {
      const Route& route = *product.route;
      for (std::int64_t row = 0; row < rows; row += route.rows) {
        char* const room = team.own + product.laid_out_bytes(own_rows);
        const std::int64_t count = std::min(rows - row, route.rows);
        const int status = lay_rows(product, x + (t + row) * K, count, room, laid_out + row * route.x_length);
        if (status != OK) team.fail(status);
      }
    };
    if constexpr (How == Division::pair) {
      const Product &a = *products[0], &b = *products[1];
      if (a.layout == b.layout && a.route->columns == b.route->columns) {
        lay(a);
        for (std::int64_t first = 0, end; first < a.tiles(); first = end) {
          end = std::min(a.tiles(), first + a.tiles_each());
          for (int n = 0; n < Count; ++n)
            compute_tiles(*products[n], laid_out, rows, {first, end}, outs[n] + t * a.columns());
          done(1, t, rows, a.tile_start(first), a.tile_start(end));
        }
        continue;
      }
    }
    for (int n = 0; n < Count; ++n) {
      const Product& product = *products[n];
      if (n == 0 || product.layout != products[n - 1]->layout) lay(product);
      compute_tiles(product, laid_out, rows, {0, product.tiles()}, outs[n] + t * product.columns());
      if (How != Division::pair || n == Count - 1) done(n, t, rows, 0, product.columns());
    }
  }
}

// Y = X W for the tokens of the call and several matrices. `done(n, row, rows, first, last)` is called when this thread
// has written the columns first .. last of rows of matrix n; once for a pair, when both are written. Every thread has
// the same values of x, in its own or shared memory.
template <Division How, int Count, class Done>
int multiply_all(const Team& team, const Product* const (&products)[Count], const float* x, float* const (&outs)[Count],
                 const Done& done) {
  const std::int64_t T = team.tokens, K = products[0]->rows();
  for (const Product* product : products)
    if (product->cast < 0 && any_inexact(*product->route, x, T * K)) return INEXACT;
  if (divides_rows(T, team.threads)) {
    multiply_rows<How>(team, products, x, outs, done);
    return OK;
  }
  Share shares[Count];
  if constexpr (How == Division::pair) {
    share_pair(team, *products[0], *products[1], shares);
  } else if constexpr (How == Division::panels) {
    for (int n = 0; n < Count; ++n) shares[n] = share_panels(team, *products[n]);
  } else {
    share_tiles(team, products, shares);
  }
  for (std::int64_t t = 0; t < T; t += rows_at_once) {
    const std::int64_t rows = std::min(T - t, rows_at_once);
    const float* laid_out = nullptr;
    for (int n = 0; n < Count; ++n) {
      const Product& product = *products[n];
      const Route& route = *product.route;
      const bool again = n > 0 && product.layout == products[n - 1]->layout;
      if (T == 1) {
        if (shares[n].first == shares[n].last) {
          if (again) continue;  // an earlier matrix of this layout may have been skipped too
          laid_out = nullptr;
          continue;
        }
        if (!again || !laid_out) {
          float* const to = reinterpret_cast<float*>(team.own);
          const int status = lay_rows(product, x, 1, team.own + product.laid_out_bytes(1), to);
          if (status != OK) team.fail(status);
          laid_out = to;
        }
      } else if (!again) {
        team.wait();  // until no thread reads the previous layout
        const std::int64_t blocks = (rows + route.rows - 1) / route.rows;
        for (std::int64_t b = team.first(blocks); b < team.last(blocks); ++b) {
          const std::int64_t row = b * route.rows, count = std::min(rows - row, route.rows);
          const int status = lay_rows(product, x + (t + row) * K, count, team.own, team.shared + row * route.x_length);
          if (status != OK) team.fail(status);
        }
        team.wait();
        laid_out = team.shared;
      }
      compute_tiles(product, laid_out, rows, shares[n], outs[n] + t * product.columns());
      const std::int64_t first = product.tile_start(shares[n].first), last = product.tile_start(shares[n].last);
      if (first < last && (How != Division::pair || n == Count - 1)) done(n, t, rows, first, last);
    }
  }
  return OK;
}

inline void add_to(float* y, const float* bias, std::int64_t n) {
  for (std::int64_t c = 0; c < n; ++c) y[c] = y[c] + bias[c];
}

// Adds a bias to this thread's columns of y; does nothing if it is nullptr.
struct Biased {
  float* y;
  std::int64_t columns;
  const float* bias;

  void operator()(int, std::int64_t row, std::int64_t rows, std::int64_t first, std::int64_t last) const {
    for (std::int64_t t = row; bias && t < row + rows; ++t) add_to(y + t * columns + first, bias + first, last - first);
  }
};

// x + factor * y, each rounded. The product is a separate statement: within one, a compiler may fuse it with the sum.
inline void add_multiple(float* x, const float* y, float factor, std::int64_t n) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float part = factor * y[c];
    x[c] = x[c] + part;
  }
}

// Adds this thread's columns of y, after its bias and times a factor, to those of x: the residual stream after a part of
// a block.
struct Residual {
  float *x, *y;
  std::int64_t columns;
  const float* bias;
  float factor;

  void operator()(int n, std::int64_t row, std::int64_t rows, std::int64_t first, std::int64_t last) const {
    Biased{y, columns, bias}(n, row, rows, first, last);
    for (std::int64_t t = row; t < row + rows; ++t) {
      const std::int64_t at = t * columns + first;
      add_multiple(x + at, y + at, factor, last - first);
    }
  }
};

// act(gate) * up for this thread's columns, after their biases; the kernel is a pass over both.
struct Gate {
  const KernelSet* kernels;
  float *gate, *up;
  std::int64_t columns;
  float* out;
  float minus_limit;  // of a clamped unit
  const float *gate_bias = nullptr, *up_bias = nullptr;

  void operator()(int n, std::int64_t row, std::int64_t rows, std::int64_t first, std::int64_t last) const {
    Biased{gate, columns, gate_bias}(n, row, rows, first, last);
    Biased{up, columns, up_bias}(n, row, rows, first, last);
    for (std::int64_t t = row; t < row + rows; ++t) {
      const std::int64_t at = t * columns + first;
      each(kernels->call[0], &minus_limit, gate + at, up + at, last - first, out + at);
    }
  }
};

struct Nothing {
  void operator()(int, std::int64_t, std::int64_t, std::int64_t, std::int64_t) const {}
};

// The norm of every row: for one token every thread computes it for itself; otherwise rows are divided and go to
// `shared`. Returns the address of the rows.
inline const float* norm_rows(const Team& team, const KernelSet& kernels, const float* x, const float* gain, float epsilon,
                              std::int64_t n, float* shared) {
  if (team.tokens == 1) {
    rms_norm_row(kernels, x, gain, epsilon, n, team.row);
    return team.row;
  }
  for (std::int64_t t = team.first(team.tokens); t < team.last(team.tokens); ++t)
    rms_norm_row(kernels, x + t * n, gain, epsilon, n, shared + t * n);
  team.wait();
  return shared;
}

// Adds this thread's part of the rows of y, times a factor, to x. `y` may be the row that this thread has normed.
inline void add_rows(const Team& team, const float* y, float factor, std::int64_t n, float* x) {
  const std::int64_t each = team.tokens == 1 ? 1 : n, count = team.tokens == 1 ? n : team.tokens;
  const std::int64_t first = team.first(count) * each, last = team.last(count) * each;
  add_multiple(x + first, y + first, factor, last - first);
}

// The position of a token in its sequence, and the cache of that sequence: for all blocks, heads of `capacity` rows
// each.
struct Place {
  std::int64_t position, capacity;
  std::uint8_t *keys, *values;
};

// How keys and values are stored: values of Type, or BFP12.
struct Kept {
  std::int64_t keys, values;
};

// Neighbouring tokens that attend together, so that each row of the cache is read, and widened, once for all of them.
constexpr std::int64_t attending = 8;

// The most tokens that attend together: fewer if each thread would otherwise have too few groups of heads.
inline std::int64_t attend_together(const Team& team, std::int64_t kv_heads) {
  return std::clamp<std::int64_t>(team.tokens * kv_heads / (8 * team.threads), 1, attending);
}

// Whether two tokens follow each other in a sequence and see the same first token.
inline bool neighbours(const Place& a, const Place& b, std::int64_t window) {
  return b.keys == a.keys && b.position == a.position + 1 && (window == 0 || b.position < window);
}

// The number of equal parts of each group of query heads that lets the threads end soonest: by the calls of the busiest
// thread, then by the threads that have work. Fewer parts read the rows of the cache fewer times.
inline std::int64_t parts_for(std::int64_t group, std::int64_t jobs, std::int64_t threads, std::int64_t queries) {
  std::int64_t best = 1, least = std::numeric_limits<std::int64_t>::max(), busy = 0;
  for (std::int64_t parts = 1; parts <= group; ++parts) {
    if (group % parts != 0) continue;
    const std::int64_t heads = group / parts, calls = heads / queries + heads % queries;
    const std::int64_t longest = (jobs * parts + threads - 1) / threads * calls, working = std::min(jobs * parts, threads);
    if (longest > least || (longest == least && working <= busy)) continue;
    best = parts, least = longest, busy = working;
  }
  return best;
}

// Attention of each token over its cache, which holds the token itself. `before` is the number of heads of the blocks
// before this one. Threads take the groups of heads in turn, because later tokens see more.
inline void attend_rows(const Team& team, const KernelSet& kernels, const Kept& kept, const Place* places,
                        std::int64_t before, std::int64_t query_heads, std::int64_t kv_heads, std::int64_t d, std::int64_t window,
                        const float* queries, float* out, float scale, float cap, const float* sinks) {
  const std::int64_t group = query_heads / kv_heads, most = attend_together(team, kv_heads), jobs = team.tokens * kv_heads;
  const bool few = most == 1 && jobs < 8 * team.threads;
  const std::int64_t parts = few ? parts_for(group, jobs, team.threads, kernels.call[10] ? together : 1) : 1;
  const std::int64_t heads = group / parts;
  std::int64_t job = 0, last;
  for (std::int64_t token = 0; token < team.tokens; token = last) {
    last = token + 1;
    while (last < team.tokens && last - token < most && neighbours(places[last - 1], places[last], window)) ++last;
    for (std::int64_t h = 0; h < query_heads; h += heads, ++job) {
      if (job % team.threads != team.thread) continue;
      const Place& place = places[last - 1];
      const std::int64_t length = place.position + 1, first = (before + h / group) * place.capacity;
      const Heads shape{last - token, query_heads, kv_heads, length, d, std::min(window, length), 0, 0, scale, cap, sinks};
      const KeptRows keys{kernels, shape, kept.keys, place.keys + first * row_bytes(kept.keys, d)};
      const KeptRows values{kernels, shape, kept.values, place.values + first * row_bytes(kept.values, d)};
      const std::int64_t row = token * query_heads * d;
      attend_heads(kernels, shape, queries + row, keys, values, 0, last - token, h, h + heads,
                   reinterpret_cast<float*>(team.own), out + row);
    }
  }
}

// **A call.**

// The matrices of all blocks in the order of their lines, and then the head, for calls with some number of tokens.
struct Products {
  std::vector<Product> all;
  std::int64_t own_bytes = 0, row_floats = 0;  // of a thread, and of a row that is laid out for all
  std::int64_t bytes = 0;                      // that one call reads
};

// The time that a step waits for the threads of its pool: a quarter of its estimated time alone, at 16 bytes of
// matrices per nanosecond for each token, and at most 20 ms. Of 120 prompts that waited for 100 us, 18 began alone on a
// machine with two virtual processors and took twice as long; of 120 that waited this time, none did.
inline std::chrono::nanoseconds gathering_time(const Products& products, std::int64_t tokens) {
  return std::chrono::nanoseconds(std::min<std::int64_t>(products.bytes / 64 * tokens, 20'000'000));
}

struct Model;

// The arguments of a generated step; without a residual stream, only the logits of `hidden` are computed.
struct Call {
  const Model* model;
  const Product* tables[3];  // the products of one token, a few and many, as needed
  const Product* products;   // the table for the tokens of the call
  std::int64_t tokens;
  const Place* places;         // of each token
  float *x, *values;           // the residual stream, and the other values that threads share
  const float* const* angles;  // for each base, of each position
  float *hidden, *logits;      // results; no logits where it is nullptr
  Likeliest* likeliest;        // of each thread, of its logits of each token; nullptr where no token is chosen
};

// The table with the fastest kernels for this many rows, by `few_are_faster` of runtime/products.py.
inline int table_for(const Product* const (&tables)[3], std::int64_t number, std::int64_t rows) {
  if (rows == 1) return 0;
  const Route &few = *tables[1][number].route, &many = *tables[2][number].route;
  return 9 * whole_blocks(rows, few) <= 8 * whole_blocks(rows, many) ? 1 : 2;
}

// How tokens are chosen at the end of a step: at temperature 0 the likeliest. Each token of the call has a choice, with
// the position and the sequence that its random numbers belong to.
struct Wanted {
  Sampling how;
  std::uint64_t seed;
  const std::uint64_t *positions, *sequences;
  std::int64_t* chosen;
};

constexpr int unchosen = 11;  // status of a step with a logit that is not finite

struct Model {
  Pool* pool;
  int (*run)(const Team&, const Call&);
  std::vector<const float*> vectors;  // gains and biases in the order of the lines
  const KernelSet *norm, *gate, *rotation, *heads;
  const std::int64_t* partners;
  std::int64_t hidden, head_dim, query_heads, kv_heads, value_columns;
  Kept kept;
  float logit_factor, logit_cap;  // a cap of 0 is none
  Barrier barrier;
  std::atomic<int> failure{OK};
  std::vector<float> memory;
  std::vector<Likeliest> likeliest;  // of each thread and each token, if tokens are to be chosen
  std::vector<Drawing> drawings;     // of each thread, if tokens are to be drawn
  std::int64_t experts, top_k;       // of a sparse layer; 0 for none
  std::vector<Choosing> choosing;    // of each thread

  std::int64_t rotation_floats() const { return 3 * padded_channels(head_dim); }
};

// **Experts** of a sparse layer, chosen by the scores of a router.
struct Experts {
  std::int64_t count, top_k;
  bool before;  // whether scores are probabilities
  std::int64_t hidden, inner;
  std::int64_t first;  // product of the first expert: gate, up and down of one expert after the other
  float minus_limit;   // of clamped units
  const float *router_bias, *gate_biases, *up_biases, *down_biases;  // of all experts; nullptr for none

  // The bias of an expert; each expert has this many numbers.
  static const float* of(const float* biases, std::int64_t expert, std::int64_t each) {
    return biases ? biases + expert * each : nullptr;
  }
  Gate gate(const KernelSet* kernels, std::int64_t expert, float* gate, float* up) const {
    return {kernels, gate, up, inner, gate, minus_limit, of(gate_biases, expert, inner), of(up_biases, expert, inner)};
  }
};

constexpr int unrouted = 9;  // status of a step in which the score of an expert is not finite

inline const Product* expert_product(const Call& call, const Experts& own, std::int64_t expert, int which, std::int64_t rows) {
  const std::int64_t number = own.first + 3 * expert + which;
  return call.tables[table_for(call.tables, number, rows)] + number;
}

// Chooses the experts of one token.
inline int choose_experts(const Experts& own, const float* x, const float* router, Choosing& choosing) {
  auto& [wide, scores, weights, chosen, order, numbers, factors] = choosing;
  gate_row(x, router, own.hidden, own.count, own.before, wide.data(), scores.data());
  if (own.router_bias) add_to(scores.data(), own.router_bias, own.count);
  const bool finite = std::all_of(scores.begin(), scores.end(), [](float score) { return !infinite(score); });
  choose_row(scores.data(), own.count, own.top_k, chosen.data());
  weigh_row(scores.data(), chosen.data(), own.top_k, own.before, wide.data(), weights.data());
  for (std::int64_t n = 0; n < own.top_k; ++n) order[n] = n;
  std::sort(order.begin(), order.end(), [&chosen = choosing.chosen](std::int64_t a, std::int64_t b) { return chosen[a] < chosen[b]; });
  numbers.clear(), factors.clear();
  for (std::int64_t n : order) numbers.push_back(chosen[n]), factors.push_back(weights[n]);
  return finite ? static_cast<int>(OK) : unrouted;
}

// Adds the weighted result of an expert to the rows of its tokens; the very first result to zeros.
struct Weighted {
  float *y, *answer;
  std::int64_t columns;
  const float* bias;
  const std::int64_t* tokens;
  const float* weights;
  bool begins;

  void operator()(int n, std::int64_t row, std::int64_t rows, std::int64_t first, std::int64_t last) const {
    Biased{answer, columns, bias}(n, row, rows, first, last);
    for (std::int64_t t = row; t < row + rows; ++t) {
      float* const to = y + tokens[t] * columns;
      for (std::int64_t c = first; c < last; ++c) {
        const float part = weights[t] * answer[t * columns + c];  // rounded separately, as a separate statement
        to[c] = (begins ? 0.0f : to[c]) + part;
      }
    }
  }
};

// The experts of one token. Every thread chooses them for itself; then it computes its columns of all of them.
inline int one_token(const Team& team, const Call& call, const Experts& own, const float* x, const float* router,
                     float* room, float* y) {
  const KernelSet* const gates = call.model->gate;
  Choosing& choice = *team.choosing;
  if (const int status = choose_experts(own, x, router, choice)) team.fail(status);
  float* const ups = room + own.top_k * own.inner;
  float* const answers = ups + own.top_k * own.inner;
  for (std::int64_t n = 0; n < own.top_k; ++n) {
    const std::int64_t e = choice.numbers[n];
    float *const gate = room + n * own.inner, *const up = ups + n * own.inner;
    const int status = multiply_all<Division::pair>(
        team, {expert_product(call, own, e, 0, 1), expert_product(call, own, e, 1, 1)}, x, {gate, up},
        own.gate(gates, e, gate, up));
    if (status != OK) return status;
  }
  team.wait();
  constexpr std::int64_t token = 0;
  for (std::int64_t n = 0; n < own.top_k; ++n) {
    float* const answer = answers + n * own.hidden;
    const std::int64_t e = choice.numbers[n];
    const float* const bias = Experts::of(own.down_biases, e, own.hidden);
    // All experts add to the same columns of y, so a thread must have the same columns of every expert.
    const int status = multiply_all<Division::panels>(
        team, {expert_product(call, own, e, 2, 1)}, room + n * own.inner, {answer},
        Weighted{y, answer, own.hidden, bias, &token, &choice.factors[n], n == 0});
    if (status != OK) return status;
  }
  return OK;
}

// The same for several tokens: each expert once, with all the tokens that chose it.
inline int several_tokens(const Team& team, const Call& call, const Experts& own, const float* x, const float* router,
                          float* room, float* y) {
  const std::int64_t T = team.tokens, k = own.top_k;
  float* const gathered = room;
  float* const gate = gathered + T * own.hidden;
  float* const up = gate + T * own.inner;
  float* const answer = up + T * own.inner;
  float* const weights = answer + T * own.hidden;
  float* const chosen = weights + T * k;  // numbers of experts below 2^24, which float32 holds
  for (std::int64_t t = team.first(T); t < team.last(T); ++t) {
    Choosing& choice = *team.choosing;
    if (const int status = choose_experts(own, x + t * own.hidden, router, choice)) team.fail(status);
    for (std::int64_t n = 0; n < k; ++n) {
      chosen[t * k + n] = static_cast<float>(choice.numbers[n]);
      weights[t * k + n] = choice.factors[n];
    }
    std::fill_n(y + t * own.hidden, own.hidden, 0.0f);
  }
  team.wait();
  auto &tokens = team.choosing->numbers;
  auto& factors = team.choosing->factors;
  for (std::int64_t e = 0; e < own.count; ++e) {
    tokens.clear(), factors.clear();
    for (std::int64_t n = 0; n < T * k; ++n)
      if (chosen[n] == static_cast<float>(e)) tokens.push_back(n / k), factors.push_back(weights[n]);
    const std::int64_t rows = static_cast<std::int64_t>(tokens.size());
    if (rows == 0) continue;
    for (std::int64_t t = team.first(rows); t < team.last(rows); ++t)
      std::memcpy(gathered + t * own.hidden, x + tokens[t] * own.hidden, own.hidden * sizeof(float));
    team.wait();
    Team part = team;
    part.tokens = rows;
    int status = multiply_all<Division::pair>(
        part, {expert_product(call, own, e, 0, rows), expert_product(call, own, e, 1, rows)}, gathered, {gate, up},
        own.gate(call.model->gate, e, gate, up));
    if (status != OK) return status;
    team.wait();
    status = multiply_all<Division::bytes>(part, {expert_product(call, own, e, 2, rows)}, gate, {answer},
                                 Weighted{y, answer, own.hidden, Experts::of(own.down_biases, e, own.hidden),
                                          tokens.data(), factors.data(), false});
    if (status != OK) return status;
    team.wait();
  }
  return OK;
}

inline int run_experts(const Team& team, const Call& call, const Experts& own, const float* x, const float* router,
                       float* room, float* y) {
  return team.tokens == 1 ? one_token(team, call, own, x, router, room, y)
                          : several_tokens(team, call, own, x, router, room, y);
}

// Scales and caps this thread's columns of the logits, if the model does, and finds the likeliest of them while they are
// in the cache.
struct Logits {
  const Model* model;
  std::int64_t columns;
  float* logits;
  Likeliest* found;

  void operator()(int, std::int64_t row, std::int64_t rows, std::int64_t first, std::int64_t last) const {
    for (std::int64_t t = row; model->logit_factor != 1 && t < row + rows; ++t)
      for (std::int64_t c = first; c < last; ++c) logits[t * columns + c] = logits[t * columns + c] * model->logit_factor;
    if (model->logit_cap != 0) {
      const Cap cap(model->logit_cap);
      for (std::int64_t t = row; t < row + rows; ++t) {
        float* const from = logits + t * columns + first;
        each(model->heads->call[7], cap.numbers, from, nullptr, last - first, from);
      }
    }
    for (std::int64_t t = row; found && t < row + rows; ++t)
      found[t].join(likeliest(logits + t * columns, static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)));
  }
};

// The logits of hidden states.
inline int score(const Team& team, const Call& call, const Product* head, const float* hidden) {
  Likeliest* const found = call.likeliest ? call.likeliest + team.thread * team.tokens : nullptr;
  return multiply_all<Division::bytes>(team, {head}, hidden, {call.logits}, Logits{call.model, head->columns(), call.logits, found});
}

// The same for those of the call; the head is the last matrix of all.
inline int score_rows(const Team& team, const Call& call, std::int64_t head) {
  return score(team, call, call.products + head, call.hidden);
}

inline std::int64_t whole_lines(std::int64_t floats) { return (floats + 15) / 16 * 16; }

// A part of the memory of a call: the floats in use, and the floats it occupies with a fence after them, in whole
// lines.
struct Area {
  std::int64_t used = 0;

  std::int64_t whole() const { return whole_lines(used) + (used ? fence : 0); }
  // Activates the fence of an area that begins here; returns the start of the next area.
  float* closed(float* start) const {
    raise_fence(start + used, start + whole());
    return start + whole();
  }
};

// The memory of a call, allocated before its threads begin: values, activations laid out for all threads, and for each
// thread memory for rotations (padded with zeros), for a normed row, and for layouts or for heads that attend.
struct Room {
  Area values, shared, rotation, row, own;

  Room(const Model& model, const Products* const (&tables)[3], const Call& call) {
    const std::int64_t group = model.query_heads / model.kv_heads, T = call.tokens;
    std::int64_t length = 1;
    for (std::int64_t t = 0; t < T; ++t) length = std::max(length, call.places[t].position + 1);
    const Heads heads{1, model.query_heads, model.kv_heads, length, model.head_dim, 0, 0, 0};
    values = {model.value_columns * T};
    std::int64_t row_floats = 0, own_bytes = 0;
    for (const Products* products : tables) {
      row_floats = std::max(row_floats, products->row_floats), own_bytes = std::max(own_bytes, products->own_bytes);
    }
    shared = {T == 1 ? 0 : (std::min(T, rows_at_once) + max_rows) * row_floats};
    rotation = {model.rotation_floats()};
    row = {model.hidden};
    // This allows for any number of threads: if the pool is busy, the caller runs alone.
    const std::int64_t laid_out = divides_rows(T, 1) ? (own_rows + max_rows) * row_floats : 0;
    own = {std::max<std::int64_t>(own_bytes / 4 + 16 + laid_out, attention_room(heads, group * (T == 1 ? 1 : attending)))};
  }
  std::int64_t each() const { return rotation.whole() + row.whole() + own.whole(); }
  std::int64_t floats(int threads) const { return values.whole() + shared.whole() + threads * each(); }
  void raise_fences(float* memory, int threads) const {
    memory = shared.closed(values.closed(memory));
    for (int n = 0; n < threads; ++n) memory = own.closed(row.closed(rotation.closed(memory)));
  }
};

// This thread's part of the choices, from what all threads have found of the logits.
inline void choose_tokens(const Team& team, const Call& call, const Wanted& wanted, std::int64_t count, Drawing& drawing) {
  for (std::int64_t t = team.first(call.tokens); t < team.last(call.tokens); ++t) {
    Likeliest all;
    for (int n = 0; n < team.threads; ++n) all.join(call.likeliest[n * call.tokens + t]);
    wanted.chosen[t] = all.token;
    if (!all.finite) team.fail(unchosen);
    if (!all.finite || wanted.how.temperature == 0) continue;
    const std::uint64_t random = random_bits(wanted.seed, wanted.positions[t], wanted.sequences[t]);
    wanted.chosen[t] = choose(call.logits + t * count, count, all.logit, wanted.how, random, drawing);
  }
}

// Runs a step in the threads of its pool, and chooses tokens if requested. Returns OK or the status of a failure: a
// cast, the pool, memory, the cache (`keep_row`), INEXACT, `unrouted` or `unchosen`. After a failure, only the cache after
// the tokens has been written.
inline int run_step(Model& model, const Products* const (&tables)[3], Call call, const Wanted* wanted) {
  const Room room(model, tables, call);
  const std::size_t floats = static_cast<std::size_t>(room.floats(model.pool->threads())) + 16;
  try {
    if (model.memory.size() < floats) model.memory.assign(floats + floats / 2, 0.0f);
    model.likeliest.assign(wanted ? model.pool->threads() * call.tokens : 0, Likeliest{});
    model.drawings.resize(wanted && wanted->how.temperature > 0 ? model.pool->threads() : 0);
    for (Drawing& each : model.drawings) each.make(tables[0]->all.back().columns());
    model.choosing.resize(model.experts ? model.pool->threads() : 0);
    for (Choosing& each : model.choosing) each.make(model.experts, model.top_k, call.tokens);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  float* const memory = model.memory.data() + (64 - reinterpret_cast<std::uintptr_t>(model.memory.data()) % 64) % 64 / 4;
  call.model = &model, call.values = memory, call.likeliest = wanted ? model.likeliest.data() : nullptr;
  for (int n = 0; n < 3; ++n) call.tables[n] = tables[n]->all.data();
  call.products = call.tables[table_for(call.tables, 0, call.tokens)];
  model.failure.store(OK, std::memory_order_relaxed);
  struct Context {
    Model* model;
    const Room* room;
    const Call* call;
    float* memory;
    const Wanted* wanted;
    std::int64_t head;
    int status;  // of all threads, which return the same status
  } context{&model, &room, &call, memory, wanted, static_cast<std::int64_t>(tables[0]->all.size()) - 1, OK};
  const auto body = [](const void* with, int thread, int threads) {
    Context& own = *const_cast<Context*>(static_cast<const Context*>(with));
    float* const mine = own.memory + own.room->values.whole() + own.room->shared.whole() + thread * own.room->each();
    float* const row = mine + own.room->rotation.whole();
    std::fill_n(mine, own.room->rotation.used, 0.0f);
    const Team team{thread, threads, &own.model->barrier, &own.model->failure, mine, row,
                    reinterpret_cast<char*>(row + own.room->row.whole()), own.memory + own.room->values.whole(),
                    own.call->tokens, own.model->experts ? &own.model->choosing[thread] : nullptr};
    const int status = own.call->x ? own.model->run(team, *own.call) : score_rows(team, *own.call, own.head);
    if (thread == 0) own.status = status;
    if (status != OK || !own.wanted) return;
    team.wait();  // until all logits are known
    Drawing none;
    choose_tokens(team, *own.call, *own.wanted, own.call->products[own.head].columns(),
                  own.model->drawings.empty() ? none : own.model->drawings[thread]);
  };
  room.raise_fences(memory, model.pool->threads());
  const Status status = model.pool->together(body, &context, gathering_time(*tables[0], call.tokens));
  lower_fences(memory, memory + room.floats(model.pool->threads()));
  if (status != OK) return status;
  if (context.status != OK) return context.status;
  return model.failure.load();
}

// The same for addresses from Python.
inline int run_places(std::uintptr_t model, const std::uint64_t* products, const std::vector<Place>& places, float* x,
                      const std::uint64_t* angles, float* hidden, float* logits, const Wanted* wanted = nullptr) {
  using bridge::at;
  const float* tables[4];
  for (int n = 0; n < 4; ++n) tables[n] = at<float>(angles[n]);
  const Products* const own[] = {at<Products>(products[0]), at<Products>(products[1]), at<Products>(products[2])};
  const Call call{nullptr, {}, nullptr, static_cast<std::int64_t>(places.size()), places.data(), x, nullptr, tables, hidden,
                  logits, nullptr};
  return run_step(*reinterpret_cast<Model*>(model), own, call, wanted);
}

// The places of a token of each of several sequences: their positions and capacities, and the addresses of their caches.
inline std::vector<Place> places_of(std::int64_t sequences, const std::int64_t* positions, const std::int64_t* capacities,
                                    const std::uint64_t* keys, const std::uint64_t* values) {
  std::vector<Place> places;
  for (std::int64_t n = 0; n < sequences; ++n)
    places.push_back({positions[n], capacities[n], reinterpret_cast<std::uint8_t*>(keys[n]),
                      reinterpret_cast<std::uint8_t*>(values[n])});
  return places;
}

namespace bridge {

// `numbers`: for each product the addresses of its linear and its route, whether it is stored, and the last three fields.
inline std::uintptr_t create_products(const std::int64_t* numbers, std::int64_t count) {
  Products* const made = new Products{};
  for (std::int64_t n = 0; n < count; ++n, numbers += 6) {
    const StoredRoute* const stored = numbers[2] ? reinterpret_cast<const StoredRoute*>(numbers[1]) : nullptr;
    const Route* const route = stored ? &stored->route : &reinterpret_cast<const OwnRoute*>(numbers[1])->route;
    const Product product{reinterpret_cast<const Linear*>(numbers[0]), route, stored, numbers[3], numbers[4],
                          numbers[5]};
    made->own_bytes = std::max(made->own_bytes, product.laid_out_bytes(1) + product.cast_bytes());
    made->row_floats = std::max(made->row_floats, route->x_length);
    made->bytes += product.bytes;
    made->all.push_back(product);
  }
  return reinterpret_cast<std::uintptr_t>(made);
}

inline void destroy_products(std::uintptr_t products) { delete at<Products>(products); }

// `numbers`: hidden, head_dim, query heads, key-value heads, columns of values, how keys and values are stored, the
// bits of the factor and the cap of the logits, and the experts of a sparse layer and of a token. `addresses`: the
// pool, the step, the kernel sets of norm, gate, rotation and heads, the partners; then the vectors.
inline std::uintptr_t create_model(const std::int64_t* numbers, const std::uint64_t* addresses, std::int64_t vectors) {
  Model* const made = new Model{};
  made->pool = reinterpret_cast<Pool*>(addresses[0]);
  made->run = reinterpret_cast<int (*)(const Team&, const Call&)>(addresses[1]);
  made->norm = at<KernelSet>(addresses[2]), made->gate = at<KernelSet>(addresses[3]);
  made->rotation = at<KernelSet>(addresses[4]), made->heads = at<KernelSet>(addresses[5]);
  made->partners = at<std::int64_t>(addresses[6]);
  for (std::int64_t n = 0; n < vectors; ++n) made->vectors.push_back(at<float>(addresses[7 + n]));
  made->hidden = numbers[0], made->head_dim = numbers[1], made->query_heads = numbers[2], made->kv_heads = numbers[3];
  made->value_columns = numbers[4], made->kept = {numbers[5], numbers[6]};
  made->logit_factor = from_bits(static_cast<std::uint32_t>(numbers[7]));
  made->logit_cap = from_bits(static_cast<std::uint32_t>(numbers[8]));
  made->experts = numbers[9], made->top_k = numbers[10];
  return reinterpret_cast<std::uintptr_t>(made);
}

inline void destroy_model(std::uintptr_t model) { delete at<Model>(model); }

// Tokens of one sequence, from a position on. `x` is the residual stream, which is overwritten; `products` are the
// addresses of three tables, `angles` one for each base. `logits` are written if `ends`.
inline int run_step(std::uintptr_t model, const std::uint64_t* products, std::int64_t tokens, float* x,
                    const std::uint64_t* angles, float* hidden, std::int64_t position, std::int64_t capacity,
                    std::uint8_t* keys, std::uint8_t* values, float* logits, int ends) try {
  if (tokens == 0) return OK;
  std::vector<Place> places;
  for (std::int64_t t = 0; t < tokens; ++t) places.push_back({position + t, capacity, keys, values});
  return run_places(model, products, places, x, angles, hidden, ends ? logits : nullptr);
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}

// A token of each of several sequences.
inline int run_batch(std::uintptr_t model, const std::uint64_t* products, std::int64_t tokens, float* x,
                     const std::uint64_t* angles, float* hidden, const std::int64_t* positions,
                     const std::int64_t* capacities, const std::uint64_t* keys, const std::uint64_t* values) try {
  if (tokens == 0) return OK;
  const std::vector<Place> places = places_of(tokens, positions, capacities, keys, values);
  return run_places(model, products, places, x, angles, hidden, nullptr);
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}

// Reads a token of each of several sequences, chooses the next of each from its logits, and goes on with those, for at
// most `most` rounds. The last round is the one with a token of `stop`, the first that ends after `turn` nanoseconds, or
// the one before a step that fails; the status is OK if there is any round. `x` are the rows of the first tokens,
// `embedding` has those of the others. The logits of a round lie `apart` floats behind those of the round before.
// `settings` are temperature, top_p and min_p; `choice` are top_k, the seed, the positions of the first choices and the
// numbers of the sequences. `chosen` receives the number of rounds, and then their tokens.
inline int run_on(std::uintptr_t model, const std::uint64_t* products, std::int64_t sequences, float* x,
                  const std::uint64_t* angles, float* hidden, const std::int64_t* positions,
                  const std::int64_t* capacities, const std::uint64_t* keys, const std::uint64_t* values, float* logits,
                  std::int64_t apart, const double* settings, const std::uint64_t* choice, const std::int64_t* embedding,
                  const std::int64_t* stop, std::int64_t stops, std::int64_t most, std::int64_t turn,
                  std::int64_t* chosen) try {
  if (sequences == 0) return OK;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(turn);
  Embedding rows;
  std::memcpy(&rows, embedding, sizeof rows);
  std::vector<Place> places = places_of(sequences, positions, capacities, keys, values);
  std::vector<std::uint64_t> at(choice + 2, choice + 2 + sequences);
  const Sampling how{settings[0], settings[1], settings[2], static_cast<std::int64_t>(choice[0])};
  std::int64_t* tokens = chosen + 1;
  chosen[0] = 0;
  for (std::int64_t n = 0; n < most; ++n, tokens += sequences, logits += apart) {
    const Wanted wanted{how, choice[1], at.data(), choice + 2 + sequences, tokens};
    const int status = run_places(model, products, places, x, angles, hidden, logits, &wanted);
    if (status != OK) return n ? OK : status;
    chosen[0] = n + 1;
    if (std::find_first_of(tokens, tokens + sequences, stop, stop + stops) != tokens + sequences) break;
    if (rows.kind == Embedding::Kind::none || std::chrono::steady_clock::now() >= end) break;
    for (std::int64_t t = 0; t < sequences; ++t) {
      embed(rows, tokens[t], x + t * rows.hidden);
      ++places[t].position, ++at[t];
    }
  }
  return OK;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}

// The logits of the hidden states of some tokens.
inline int score_rows(std::uintptr_t model, const std::uint64_t* products, std::int64_t tokens, float* hidden,
                      float* logits) try {
  if (tokens == 0) return OK;
  const std::uint64_t none[4] = {};
  return run_places(model, products, std::vector<Place>(tokens), nullptr, none, hidden, logits);
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}

}  // namespace bridge
}  // namespace lowbit
