//! Output that a connection has not read yet.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// What a queued message costs beside its bytes.
const OVERHEAD: usize = 64;

#[derive(Debug)]
enum Message {
    Reply(Vec<u8>),
    Event(Arc<[u8]>),
}

impl Message {
    fn bytes(&self) -> &[u8] {
        match self {
            Message::Reply(bytes) => bytes,
            Message::Event(bytes) => bytes,
        }
    }
}

/// Whole messages in the order they go out. Equal watch events that wait at the same time are one
/// (XSA-349): whoever reads it looks at the store afterwards, and so sees every change before.
#[derive(Default, Debug)]
pub struct Outbox {
    queue: VecDeque<Message>,
    /// The events in `queue`.
    events: HashSet<Arc<[u8]>>,
    /// Cost of `queue`.
    cost: usize,
    /// Bytes of the first message that went out already.
    sent: usize,
}

impl Outbox {
    /// What waits, in bytes, with an overhead for each message.
    pub fn cost(&self) -> usize {
        self.cost
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Copies the next bytes to go out into `buffer`, and returns how many. They stay queued until
    /// [`advance`](Self::advance).
    pub fn peek(&self, buffer: &mut [u8]) -> usize {
        let mut filled = 0;
        let mut skip = self.sent;
        for message in &self.queue {
            let bytes = &message.bytes()[skip..];
            skip = 0;
            let part = bytes.len().min(buffer.len() - filled);
            buffer[filled..filled + part].copy_from_slice(&bytes[..part]);
            filled += part;
            if part < bytes.len() {
                break;
            }
        }
        filled
    }

    /// Says that the next `count` bytes went out. A count beyond what waits empties the outbox.
    pub fn advance(&mut self, mut count: usize) {
        while let Some(message) = self.queue.front() {
            let rest = message.bytes().len() - self.sent;
            if count < rest {
                self.sent += count;
                return;
            }
            count -= rest;
            self.sent = 0;
            self.cost -= message.bytes().len() + OVERHEAD;
            if let Message::Event(event) = message {
                self.events.remove(event);
            }
            self.queue.pop_front();
        }
    }

    pub(super) fn push_reply(&mut self, bytes: Vec<u8>) {
        self.push(Message::Reply(bytes));
    }

    /// Queues an event; `false` if an equal one waits already.
    pub(super) fn push_event(&mut self, bytes: &[u8]) -> bool {
        if self.events.contains(bytes) {
            return false;
        }
        let event: Arc<[u8]> = bytes.into();
        self.events.insert(Arc::clone(&event));
        self.push(Message::Event(event));
        true
    }

    fn push(&mut self, message: Message) {
        self.cost += message.bytes().len() + OVERHEAD;
        self.queue.push_back(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order_whatever_the_pieces() {
        let mut outbox = Outbox::default();
        outbox.push_reply(b"reply".to_vec());
        assert!(outbox.push_event(b"event"));
        outbox.push_reply(b"more".to_vec());
        let mut seen = Vec::new();
        while !outbox.is_empty() {
            let mut piece = [0; 3];
            let filled = outbox.peek(&mut piece);
            let taken = filled.min(2);
            seen.extend_from_slice(&piece[..taken]);
            outbox.advance(taken);
        }
        assert_eq!(seen, b"replyeventmore");
        assert_eq!(outbox.cost(), 0);
    }

    #[test]
    fn xsa_349_equal_events_that_wait_are_one() {
        let mut outbox = Outbox::default();
        assert!(outbox.push_event(b"a"));
        assert!(outbox.push_event(b"b"));
        let cost = outbox.cost();
        for _ in 0..1000 {
            assert!(!outbox.push_event(b"a"));
        }
        assert_eq!(outbox.cost(), cost);
        outbox.advance(1);
        assert!(outbox.push_event(b"a"), "it was read, so a new one counts again");
    }
}
