//! Records of verdicts, for the recorder.

use core::net::SocketAddr;

use ringfence_policy::gate::Decision;
use ringfence_policy::record::{Event, Record};
use ringfence_policy::{Action, HostName, Protocol};

use super::notes::Note;
use super::{Egress, EgressState, Recording};
use crate::access::Refusal;
use crate::upstream::fault::ProxyFault;

/// Builds the record of a flow, or of a query. Protocols without ports have port 0, which the record leaves out.
pub(super) fn record_of(
    event: Event,
    verdict: Action,
    to: Option<(SocketAddr, Protocol)>,
    reason: String,
) -> Record {
    Record {
        event,
        verdict,
        name: None,
        address: to.map(|(to, _)| to.ip()),
        port: to.map(|(to, _)| to.port()).filter(|port| *port > 0),
        protocol: to.map(|(_, protocol)| protocol),
        reason,
        allow: None,
        sni: None,
        bytes_out: None,
        bytes_in: None,
    }
}

impl Egress {
    /// Records a new flow to an address that the guest cannot reach, whatever the policy is.
    pub(crate) fn refuse(
        &self,
        to: SocketAddr,
        name: Option<&HostName>,
        protocol: Protocol,
        refusal: Refusal,
    ) {
        self.note_refusal(
            to,
            name.map(HostName::to_string),
            protocol,
            refusal.describe().to_owned(),
        );
    }

    /// Records a connection that the upstream proxy does not carry.
    pub(crate) fn fail_at_proxy(&self, to: SocketAddr, name: Option<&HostName>, fault: ProxyFault) {
        self.note_refusal(to, name.map(HostName::to_string), Protocol::Tcp, fault.to_string());
    }

    /// Records a flow that does not come about for a reason that no rule changes.
    fn note_refusal(
        &self,
        to: SocketAddr,
        name: Option<String>,
        protocol: Protocol,
        reason: String,
    ) {
        let Some(notes) = &self.notes else { return };
        let record = record_of(Event::Connect, Action::Deny, Some((to, protocol)), reason);
        let record = Record { name, ..record };
        let _ = notes.try_send(Some(Note::Verdict { record, learn: None }));
    }

    /// Sends an event to the recorder, if there is one.
    pub(super) fn note(
        &self,
        state: &EgressState,
        event: Event,
        decision: &Decision,
        to: Option<(SocketAddr, Protocol)>,
        sni: Option<String>,
    ) {
        let Some(notes) = &self.notes else { return };
        let verdict = decision.verdict;
        if state.recording == Recording::Denials && verdict.is_allowed() {
            return;
        }
        let (name, policy) = (decision.name.as_ref(), state.gate.policy());
        let missing = policy.missing_rule(verdict.cause, name, to);
        let record = Record {
            name: name.map(HostName::to_string),
            allow: missing.filter(|_| !verdict.is_allowed()),
            sni,
            ..record_of(event, verdict.action, to, policy.describe(verdict.cause))
        };
        let learn = to.map(|(to, protocol)| (name.cloned(), to, protocol));
        // The recorder bounds its rate; a guest that floods it loses its own lines.
        let _ = notes.try_send(Some(Note::Verdict { record, learn }));
    }
}
