//! Recorder of egress verdicts: a thread of the uplink's process that sends JSON lines and learned rules to the
//! launcher, which writes the files.
//!
//! Engines never wait for the recorder: what does not fit its queue is lost. Repeated verdicts are folded and the
//! rate is bounded ([`Journal`]).

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use ringfence_policy::record::{Journal, Learned};
use ringfence_sandbox::channel::Channel;
use ringfence_sys::clock::monotonic;
use ringfence_uplink::egress::{Note, NoteQueue};

use crate::messages::FromUplink;

/// Maximum number of events in the queue.
const QUEUE_MAX: usize = 4096;
/// Interval at which folded lines are looked at without an event.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Length of the lines in one message, in bytes. Their quotes are escaped, and the longest line is some 2 KiB.
const MESSAGE_MAX: usize = 8 << 10;

/// Queue to the recorder. `None` is its end.
pub(super) type Queue = NoteQueue;

/// Creates the queue to a recorder.
pub(super) fn queue() -> (Queue, Receiver<Option<Note>>) {
    sync_channel(QUEUE_MAX)
}

/// Recorder of a guest, once it runs: from the start on, or from the first policy on.
#[derive(Clone, Debug, Default)]
pub(super) struct RecorderOfGuest(Arc<Mutex<Option<RunningRecorder>>>);

#[derive(Debug)]
struct RunningRecorder {
    queue: Queue,
    thread: JoinHandle<()>,
}

impl RecorderOfGuest {
    /// Starts the recorder. It ends with the queue.
    pub(super) fn start(
        &self,
        channel: &Channel,
        guest: String,
        queue: Queue,
        notes: Receiver<Option<Note>>,
    ) -> io::Result<()> {
        let channel = channel.try_clone()?;
        let thread = std::thread::Builder::new().name("egress-log".into()).spawn(move || {
            let mut recorder =
                Recorder { channel, journal: Journal::new(guest), learned: Learned::default() };
            recorder.run(&notes);
        })?;
        let running = RunningRecorder { queue, thread };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        Ok(())
    }

    /// Ends the recorder, which sends its last lines.
    pub(super) fn finish(&self) {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(RunningRecorder { queue, thread }) = running {
            // Engines of other threads keep the queue open. A recorder that failed has nothing to finish.
            let _ = queue.send(None).map(|()| thread.join());
        }
    }
}

struct Recorder {
    channel: Channel,
    journal: Journal,
    learned: Learned,
}

impl Recorder {
    fn run(&mut self, notes: &Receiver<Option<Note>>) {
        let mut lines = String::new();
        loop {
            let note = match notes.recv_timeout(FLUSH_EVERY) {
                Ok(Some(note)) => Some(note),
                Err(RecvTimeoutError::Timeout) => None,
                Ok(None) | Err(RecvTimeoutError::Disconnected) => break,
            };
            match note {
                Some(note) => self.add(note, &mut lines),
                None => self.journal.flush(monotonic(), time_of_day(), &mut lines),
            }
            self.send(&mut lines);
        }
        self.journal.finish(monotonic(), time_of_day(), &mut lines);
        self.send(&mut lines);
    }

    fn add(&mut self, note: Note, lines: &mut String) {
        let (record, learn) = match note {
            Note::Verdict { record, learn } => (record, learn),
            Note::Question(question) => {
                // A launcher that is gone answers nothing.
                let _ = self.channel.send(&FromUplink::Question(question.into()), &[]);
                return;
            }
            Note::Over(id) => {
                let _ = self.channel.send(&FromUplink::QuestionOver(id), &[]);
                return;
            }
        };
        self.journal.add(record, monotonic(), time_of_day(), lines);
        let Some((name, to, protocol)) = learn else { return };
        let rules = self.learned.add(name.as_ref(), to.ip(), to.port(), protocol);
        if !rules.is_empty() {
            // A launcher that is gone needs no rules.
            let _ = self.channel.send(&FromUplink::Learned(rules), &[]);
        }
    }

    fn send(&self, lines: &mut String) {
        let mut message = String::new();
        for line in lines.split_inclusive('\n') {
            if message.len() + line.len() > MESSAGE_MAX {
                let _ = self.channel.send(&FromUplink::Records(std::mem::take(&mut message)), &[]);
            }
            message.push_str(line);
        }
        if !message.is_empty() {
            let _ = self.channel.send(&FromUplink::Records(message), &[]);
        }
        lines.clear();
    }
}

/// Returns the time since 1970 in seconds.
fn time_of_day() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1000.0).round() / 1000.0
}
