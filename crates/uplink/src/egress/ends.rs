//! Records of flows that end.

use core::net::SocketAddr;

use ringfence_policy::record::{Event, Record};
use ringfence_policy::{Action, Protocol};

use super::recording::record_of;
use super::{CarriedBytes, Egress, Note, Recording};

impl Egress {
    /// Records the end of a TCP connection, and a limit as its reason.
    pub fn close(
        &self,
        to: SocketAddr,
        name: Option<String>,
        bytes: CarriedBytes,
        limit: Option<String>,
    ) {
        let verdict = if limit.is_some() { Action::Deny } else { Action::Allow };
        let reason = limit.unwrap_or_else(|| "closed".to_owned());
        let CarriedBytes { from_guest, to_guest } = bytes;
        let (bytes_out, bytes_in) = (Some(from_guest), Some(to_guest));
        let record = end_of(to, Protocol::Tcp, verdict, reason);
        self.note_end(Record { name, bytes_out, bytes_in, ..record });
    }

    /// Records the end of a UDP association by a limit.
    pub(crate) fn close_by_limit(&self, to: SocketAddr, limit: String) {
        self.note_end(end_of(to, Protocol::Udp, Action::Deny, limit));
    }

    fn note_end(&self, record: Record) {
        let Some(notes) = &self.notes else { return };
        if record.verdict == Action::Allow && self.state().recording == Recording::Denials {
            return;
        }
        let _ = notes.try_send(Some(Note::Verdict { record, learn: None }));
    }
}

/// Builds the record of an end. Both protocols have ports, of which a guest can use 0.
fn end_of(to: SocketAddr, protocol: Protocol, verdict: Action, reason: String) -> Record {
    let record = record_of(Event::Close, verdict, Some((to, protocol)), reason);
    Record { port: Some(to.port()), ..record }
}
