//! Report on the clients of a device: the memory that it sees, and the clients that broke rules.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::pool::{HandedOver, size};

/// State of a device's clients, for a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientReport {
    /// Memory that the client of now has handed over.
    pub memory: Option<HandedOver>,
    /// Number of clients that were disconnected because they broke a rule.
    pub refused: u64,
}

/// Function that receives each change of the clients' state. It must not block.
pub type Reporter = Box<dyn Fn(ClientReport) + Send>;

/// Reports changes of the clients' state.
#[derive(Default)]
pub struct ClientReporter {
    report: Option<Reporter>,
    reported: ClientReport,
    refused: u64,
}

impl ClientReporter {
    /// Creates a reporter. Without a function nothing is reported.
    pub fn new(report: Option<Reporter>) -> ClientReporter {
        ClientReporter { report, ..ClientReporter::default() }
    }

    /// Counts a client that broke a rule.
    pub fn refused(&mut self) {
        self.refused += 1;
    }

    /// Returns the number of clients that broke a rule.
    pub fn count(&self) -> u64 {
        self.refused
    }

    /// Reports the state if it has changed. `memory` is that of the client of now.
    pub fn report(&mut self, memory: Option<HandedOver>) {
        let state = ClientReport { memory, refused: self.refused };
        if state != self.reported
            && let Some(report) = &self.report
        {
            self.reported = state;
            report(state);
        }
    }
}

/// State of a virtual machine's client. The field names are those of `ringfence status --json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineState {
    /// Memory that the client of now has handed over. `None` without a client, and until it does.
    pub memory: Option<MachineMemory>,
    /// Bytes of memory that the client of now has handed over to a proxy, and that the backend does not get.
    #[serde(default)]
    pub withheld_bytes: u64,
    /// Number of clients that were disconnected because they broke a rule.
    pub clients_refused: u64,
}

impl MachineState {
    /// Returns a text about the memory that the backend does not get, if there is any.
    pub fn withheld(&self) -> Option<String> {
        (self.withheld_bytes > 0).then(|| format!("{} withheld", size(self.withheld_bytes)))
    }
}

/// Memory of a virtual machine that a device's process can reach.
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

impl From<HandedOver> for MachineMemory {
    fn from(HandedOver { bytes, is_pool }: HandedOver) -> MachineMemory {
        MachineMemory { bytes, is_pool }
    }
}

impl From<ClientReport> for MachineState {
    fn from(report: ClientReport) -> MachineState {
        let memory = report.memory.map(Into::into);
        MachineState { memory, clients_refused: report.refused, ..MachineState::default() }
    }
}
