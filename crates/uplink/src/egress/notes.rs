//! Notes for the recorder: verdicts and questions.

use core::net::SocketAddr;
use std::sync::mpsc::SyncSender;

use ringfence_policy::record::Record;
use ringfence_policy::{HostName, Protocol};

use super::asking::{Question, QuestionId};

/// Event for the recorder.
#[derive(Clone, Debug)]
pub enum Note {
    Verdict {
        record: Record,
        /// Destination that a learned policy must allow: name if known, address and port, protocol.
        learn: Option<(Option<HostName>, SocketAddr, Protocol)>,
    },
    /// Question for whoever started the guest.
    Question(Question),
    /// The question of this number needs no answer any more.
    Over(QuestionId),
}

/// Queue to the recorder. `None` is for the owner of the queue.
pub type NoteQueue = SyncSender<Option<Note>>;
