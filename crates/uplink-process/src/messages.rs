//! Messages that follow the configuration of the uplink process, and its reports.

use std::fmt;
use std::net::IpAddr;

use ringfence_link::vhost_user::{ClientReport, HandedOver};
use ringfence_policy::approvals::Host;
use ringfence_policy::{HostName, Protocol, RuleSource, Subject};
use ringfence_uplink::egress::{Answer, Question};
use serde::{Deserialize, Serialize};

use crate::totals::EgressTotals;

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

/// State of a virtual machine's client. The field names are those of `ringfence status --json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineState {
    /// Memory that the client of now has handed over. `None` without a client, and until it does.
    pub memory: Option<MachineMemory>,
    /// Number of clients that were disconnected because they broke a rule.
    pub clients_refused: u64,
}

/// Memory of a virtual machine that the uplink's process can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineMemory {
    pub bytes: u64,
    /// Set if the memory is a pool, not the machine's own.
    pub is_pool: bool,
}

impl fmt::Display for MachineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &MachineMemory { bytes, is_pool } = self;
        HandedOver { bytes, is_pool }.fmt(f)
    }
}

impl From<ClientReport> for MachineState {
    fn from(report: ClientReport) -> MachineState {
        let memory =
            report.memory.map(|HandedOver { bytes, is_pool }| MachineMemory { bytes, is_pool });
        MachineState { memory, clients_refused: report.refused }
    }
}

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
    /// Totals of the egress policy, if there is one: the answer to [`UplinkOrder::Totals`](crate::orders::UplinkOrder::Totals), and the last message.
    Totals(Option<EgressTotals>),
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
    /// The uplink cannot continue, for this reason.
    Failed(String),
}
