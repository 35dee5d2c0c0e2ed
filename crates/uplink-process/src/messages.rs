//! Messages that follow the configuration of the uplink process, and its reports.

use std::net::IpAddr;

pub use ringfence_link::vhost_user::{MachineMemory, MachineState};
use ringfence_policy::approvals::Host;
use ringfence_policy::{HostName, Protocol, RuleSource, Subject};
use ringfence_uplink::egress::{Answer, Question};
use serde::{Deserialize, Serialize};

use crate::totals::UplinkTotals;

/// Maximum number of descriptors in one message to the uplink.
pub const BATCH: usize = 16;

/// Maximum number of rules in one message. Each has at most 512 bytes, and the name of its file.
pub const RULES_IN_MESSAGE: usize = 6;

/// Next rules of the egress policy, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkRules(pub Vec<RuleSource>);

/// Next sockets of the list of forwards, in its order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkSockets;

/// Question of the uplink process, which is not trusted. [`AskedAbout::into_subject`] validates it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskedAbout {
    /// Number of the question, never used again.
    pub id: u64,
    /// Name of the destination. `None`: its address.
    pub name: Option<String>,
    pub address: Option<IpAddr>,
    pub port: u16,
    pub protocol: Protocol,
}

impl From<Question> for AskedAbout {
    fn from(Question { id, subject }: Question) -> AskedAbout {
        let Subject { host, port, protocol } = subject;
        let (name, address) = match host {
            Host::Name(name) => (Some(name.to_string()), None),
            Host::Address(ip) => (None, Some(ip)),
        };
        AskedAbout { id, name, address, port, protocol }
    }
}

impl AskedAbout {
    /// Returns the destination. `None` if it is none that can be approved.
    pub fn into_subject(self) -> Option<Subject> {
        let host = match (self.name, self.address) {
            (Some(name), None) => Host::Name(HostName::parse(&name).ok()?),
            (None, Some(ip)) => Host::Address(ip),
            _ => return None,
        };
        Subject { host, port: self.port, protocol: self.protocol }.checked()
    }
}

/// Answer for the uplink process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AnswerToUplink {
    Once,
    Run,
    Deny,
    /// Nobody can answer.
    Unattended,
}

impl From<AnswerToUplink> for Answer {
    fn from(answer: AnswerToUplink) -> Answer {
        match answer {
            AnswerToUplink::Once => Answer::Once,
            AnswerToUplink::Run => Answer::Run,
            AnswerToUplink::Deny => Answer::Deny,
            AnswerToUplink::Unattended => Answer::Unattended,
        }
    }
}

/// Reports of the uplink process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromUplink {
    /// The uplink carries packets.
    Up {
        link: String,
        /// Functions that are unavailable on this system, with reasons.
        remarks: Vec<String>,
    },
    /// Result of the [`ForwardedPortOrder`](crate::forwarded_ports::ForwardedPortOrder) with this number.
    Port {
        id: u32,
        /// Reason for which the order failed.
        error: Option<String>,
    },
    /// Result of [`UplinkOrder::Policy`](crate::orders::UplinkOrder::Policy).
    Policy {
        /// Reason for which the old policy stays.
        error: Option<String>,
    },
    /// Totals: the answer to [`UplinkOrder::Totals`](crate::orders::UplinkOrder::Totals), and the last message
    /// of an uplink with a policy.
    Totals(Box<UplinkTotals>),
    /// State of a virtual machine's client, after each change.
    Machine(MachineState),
    /// The uplink needs more sockets of the guest's network.
    Sockets,
    /// Lines for `--egress-log`, `policy watch` and the list of denials.
    Records(String),
    /// Rules for `--egress-learn`.
    Learned(Vec<String>),
    /// Question about a destination that no rule covers ([`asking`](crate::asking)).
    Question(AskedAbout),
    /// The question of this number needs no answer any more.
    QuestionOver(u64),
    /// Answer to [`UplinkOrder::Drain`](crate::orders::UplinkOrder::Drain): the last data of the guest was carried.
    Drained,
    /// The uplink cannot continue, for this reason.
    Failed(String),
}
