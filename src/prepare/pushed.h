// PrepareFinalize over symmetric heaps: rows are written straight into slots of the rank that
// serves them, results straight into slots of the token's owner; counts travel with the rows'
// flags, so that nobody meets before rows move. The protocol is kernels/common/ep_protocol.h.
#pragma once

#include <string_view>

#include "prepare/prepare_finalize.h"

namespace moekit::prepare {

class Pushed final : public PrepareFinalize {
 public:
  Pushed(std::string_view name, RowsLayout rows) : name_(name), rows_(rows) {}

  std::string_view name() const override { return name_; }
  Traits traits(const Problem& problem) const override;
  Support supports(const Problem& problem) const override;
  int64_t workspace_bytes(const Problem& problem, const RowFormat& wire,
                          QuantDuty quant_duty) const override;
  HeapNeed heap_need(const Problem& problem, const RowFormat& wire,
                     QuantDuty quant_duty) const override;
  int64_t wire_bytes(const Problem& problem, const RowFormat& wire) const override;
  void prepare_send(const PrepareArgs& args) const override;
  bool prepare_ready(const PrepareArgs& args) const override;
  ExpertRows prepare_receive(const PrepareArgs& args) const override;
  float* results(const PrepareArgs& args) const override;
  void finalize_send(const FinalizeArgs& args) const override;
  bool finalize_ready(const FinalizeArgs& args) const override;
  void finalize_receive(const FinalizeArgs& args) const override;

 private:
  const std::string_view name_;
  const RowsLayout rows_;
};

}  // namespace moekit::prepare
