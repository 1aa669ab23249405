// PrepareFinalize over several ranks. A member chooses which rows travel and in which layout the
// experts get them.
#pragma once

#include <string_view>

#include "prepare/distributed_layout.h"
#include "prepare/prepare_finalize.h"

namespace moekit::prepare {

class Distributed : public PrepareFinalize {
 public:
  Distributed(std::string_view name, Spread spread, RowsLayout rows)
      : name_(name), spread_(spread), rows_(rows) {}

  std::string_view name() const final { return name_; }
  Traits traits(const Problem& problem) const final;
  Support supports(const Problem& problem) const final;
  int64_t workspace_bytes(const Problem& problem, const RowFormat& wire,
                          QuantDuty quant_duty) const final;
  int64_t wire_bytes(const Problem& problem, const RowFormat& wire) const final;
  void prepare_send(const PrepareArgs& args) const final;
  bool prepare_ready(const PrepareArgs& args) const final;
  ExpertRows prepare_receive(const PrepareArgs& args) const final;
  void finalize_send(const FinalizeArgs& args) const final;
  bool finalize_ready(const FinalizeArgs& args) const final;
  void finalize_receive(const FinalizeArgs& args) const final;

 private:
  const std::string_view name_;
  const Spread spread_;
  const RowsLayout rows_;
};

}  // namespace moekit::prepare
