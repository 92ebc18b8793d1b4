// Collectives as coroutines over sends and receives. No torch in here. Ranks are group ranks, counts are elements.
// Each result is reduced in an order that depends on the number of ranks and the size only, and by one rank or by all
// in the same way: the same bits on every rank, run after run.
// Of a group with absent ranks, all-reduce, broadcast, reduce and the barriers go over those present; whoever calls
// another one has checked that nobody is absent.
#pragma once
#include <cstddef>
#include <vector>

#include "transfer.hpp"

namespace delta {

struct Span {
  char* data = nullptr;
  size_t bytes = 0;
};
struct ConstSpan {
  const char* data = nullptr;
  size_t bytes = 0;
};

Task all_reduce(Operation& op, char* data, size_t count, Reduction reduction);
Task broadcast(Operation& op, int root, Span buffer);
Task reduce(Operation& op, int root, char* data, size_t count, Reduction reduction);
// parts[r] is where rank r's contribution goes; parts[own rank] already holds this rank's.
Task all_gather(Operation& op, std::vector<Span> parts);
// parts[r] is this rank's contribution to rank r's result, which comes to `out`; all ranks agree on the sizes.
Task reduce_scatter(Operation& op, std::vector<ConstSpan> parts, char* out, Reduction reduction);
Task gather(Operation& op, int root, ConstSpan own, std::vector<Span> parts);
Task scatter(Operation& op, int root, Span own, std::vector<ConstSpan> parts);
Task all_to_all(Operation& op, std::vector<ConstSpan> out, std::vector<Span> in);
Task barrier(Operation& op);
// Everybody reports to rank 0, which waits for all and then lets them go: its timeout names who is missing.
Task monitored_barrier(Operation& op);
Task send_to(Operation& op, int to, uint32_t tag, ConstSpan data);
Task recv_from(Operation& op, int from, uint32_t tag, Span data);  // from < 0: any

}  // namespace delta
