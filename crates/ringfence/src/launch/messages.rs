//! Messages about a guest that its launcher keeps in memory, for `ringfence logs`.
//!
//! ```text
//!  reports of the launcher ──────────────────> queue ┐
//!  standard error of the frontend ───────────> queue ├─ merged by number ─> clients
//!  … of the uplink, of the driver domain ────> queue ┘
//! ```
//!
//! Each source has a queue of its own, bounded in lines and bytes: a source that writes much displaces only its own
//! older messages. The store is one for the process, because the log of the crates below is one, too. It ends with
//! the launcher.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::commands::{Message, Source};

/// Maximum number of messages of one source.
const MESSAGES_MAX: usize = 500;
/// Maximum length of the texts of one source, in bytes.
const BYTES_MAX: usize = 64 << 10;
/// Maximum number of messages in one reply, and the length of their texts in bytes. With all characters escaped, they
/// fit in one packet of a channel.
const REPLY_MESSAGES_MAX: usize = 64;
const REPLY_BYTES_MAX: usize = 10 << 10;

static KEPT: Mutex<Messages> = Mutex::new(Messages::new());

/// Locks the messages of this process.
pub(super) fn kept() -> MutexGuard<'static, Messages> {
    // A thread that panicked had finished its message or not begun it.
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Messages of all sources.
pub(super) struct Messages {
    /// Number of the newest message, 0 before the first.
    newest: u64,
    queues: [Queue; Source::ALL.len()],
}

/// Messages of one source, oldest first.
struct Queue {
    list: VecDeque<Message>,
    bytes: usize,
}

impl Messages {
    const fn new() -> Messages {
        const EMPTY: Queue = Queue { list: VecDeque::new(), bytes: 0 };
        Messages { newest: 0, queues: [EMPTY; Source::ALL.len()] }
    }

    /// Adds a message of one line without control characters.
    pub(super) fn add(&mut self, source: Source, text: &str) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.newest += 1;
        let message = Message {
            number: self.newest,
            time: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            source,
            text: text.to_owned(),
        };
        let at = Source::ALL.iter().position(|known| *known == source).unwrap_or_default();
        let queue = &mut self.queues[at];
        queue.bytes += message.text.len();
        queue.list.push_back(message);
        while queue.list.len() > MESSAGES_MAX || queue.bytes > BYTES_MAX {
            let Some(oldest) = queue.list.pop_front() else { break };
            queue.bytes -= oldest.text.len();
        }
    }

    /// Returns the number of the newest message, 0 before the first.
    pub(super) fn newest(&self) -> u64 {
        self.newest
    }

    /// Returns the messages that follow the one of this number, as many as fit in one reply, oldest first.
    pub(super) fn after(&self, number: u64) -> Vec<Message> {
        let newer = |message: &&Message| message.number > number;
        let mut found: Vec<&Message> =
            self.queues.iter().flat_map(|queue| queue.list.iter().filter(newer)).collect();
        found.sort_unstable_by_key(|message| message.number);
        let mut bytes = 0;
        let fits = |message: &&Message| {
            bytes += message.text.len();
            bytes <= REPLY_BYTES_MAX
        };
        found.into_iter().take(REPLY_MESSAGES_MAX).take_while(fits).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::Reply;
    use ringfence_hostnet::text::printable;

    /// Reads all messages, one reply after the other.
    fn all(messages: &Messages) -> Vec<Message> {
        let mut read = Vec::new();
        loop {
            let part = messages.after(read.last().map_or(0, |last: &Message| last.number));
            if part.is_empty() {
                return read;
            }
            read.extend(part);
        }
    }

    #[test]
    fn messages_of_several_sources_are_read_in_their_order() {
        let mut messages = Messages::new();
        for number in 0..200 {
            messages.add(Source::ALL[number % 4], &format!("line {number}"));
        }
        let read = all(&messages);
        assert_eq!(read.len(), 200);
        for (number, message) in read.iter().enumerate() {
            assert_eq!(message.text, format!("line {number}"));
            assert_eq!(message.source, Source::ALL[number % 4]);
        }
        assert_eq!(read.last().unwrap().number, messages.newest());
    }

    #[test]
    fn source_that_floods_displaces_only_its_own_messages() {
        let mut messages = Messages::new();
        messages.add(Source::Launcher, "first");
        for number in 0..100_000 {
            messages.add(Source::Frontend, &format!("{number} {}", "x".repeat(number % 490)));
        }
        messages.add(Source::Uplink, "last");
        let read = all(&messages);
        assert_eq!((read[0].text.as_str(), read[0].source), ("first", Source::Launcher));
        assert_eq!(read.last().unwrap().text, "last");
        let flood: Vec<_> = read.iter().filter(|m| m.source == Source::Frontend).collect();
        assert!((1..=MESSAGES_MAX).contains(&flood.len()), "{}", flood.len());
        assert!(flood.iter().map(|m| m.text.len()).sum::<usize>() <= BYTES_MAX);
        assert!(flood.last().unwrap().text.starts_with("99999 "));
        for _ in 0..2 * MESSAGES_MAX {
            messages.add(Source::Frontend, "");
        }
        assert_eq!(all(&messages).len(), MESSAGES_MAX + 2);
    }

    #[test]
    fn longest_reply_fits_in_a_packet() {
        let mut messages = Messages::new();
        for _ in 0..400 {
            messages.add(Source::Driver, &printable(&"\"\\\u{1b}".repeat(500)));
        }
        for _ in 0..400 {
            messages.add(Source::Driver, "\"");
        }
        let mut number = 0;
        while let Some(last) = messages.after(number).last() {
            let reply = Reply::Messages(messages.after(number));
            let length = serde_json::to_vec(&reply).unwrap().len();
            assert!(length <= ringfence_sandbox::channel::MESSAGE_MAX, "{length} bytes");
            number = last.number;
        }
        assert!(number > 0);
    }
}
