//! Faults of the backend that end a connection.

use ringfence_platform::ChannelError;
use ringfence_sys::rules::RuleCounters;

/// Fault that ended a connection: the rule that the backend broke.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BrokenRule(pub(super) &'static str);

/// Counts a fault of the event channel.
pub(super) fn channel_rule(rules: &RuleCounters, error: ChannelError) -> BrokenRule {
    let rule = match error {
        ChannelError::PeerGone => "channel_closed",
        ChannelError::System(_) => "channel_failed",
    };
    rules.count(rule);
    BrokenRule(rule)
}
