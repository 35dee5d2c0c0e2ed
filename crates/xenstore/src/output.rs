//! Output queue of one connection: replies and events that the peer has not read.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// Cost of a queued message in addition to its bytes.
const OVERHEAD: usize = 64;

#[derive(Debug)]
enum StoreMessage {
    Reply(Vec<u8>),
    Event(Arc<[u8]>),
}

impl StoreMessage {
    fn bytes(&self) -> &[u8] {
        match self {
            StoreMessage::Reply(bytes) => bytes,
            StoreMessage::Event(bytes) => bytes,
        }
    }
}

/// Queue of whole messages in the order of sending. Equal watch events that wait at the same time are
/// merged (XSA-349): the reader of an event reads the store afterwards, so it sees every earlier change.
#[derive(Default, Debug)]
pub struct OutputQueue {
    queue: VecDeque<StoreMessage>,
    /// Events in `queue`, to find equal ones.
    events: HashSet<Arc<[u8]>>,
    /// Total cost of the messages in `queue`.
    cost: usize,
    /// Number of bytes of the first message that were sent.
    sent: usize,
}

impl OutputQueue {
    /// Returns the cost of the waiting messages: their bytes, and an overhead for each message.
    pub fn cost(&self) -> usize {
        self.cost
    }

    /// Returns `true` if no message waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Copies the next bytes to send into `buffer` and returns their number. The bytes stay queued until
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

    /// Removes the next `count` bytes, which were sent. A larger count than waits empties the queue.
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
            if let StoreMessage::Event(event) = message {
                self.events.remove(event);
            }
            self.queue.pop_front();
        }
    }

    pub(super) fn push_reply(&mut self, bytes: Vec<u8>) {
        self.push(StoreMessage::Reply(bytes));
    }

    /// Queues an event. Returns `false` if an equal event waits already.
    pub(super) fn push_event(&mut self, bytes: &[u8]) -> bool {
        if self.events.contains(bytes) {
            return false;
        }
        let event: Arc<[u8]> = bytes.into();
        self.events.insert(Arc::clone(&event));
        self.push(StoreMessage::Event(event));
        true
    }

    fn push(&mut self, message: StoreMessage) {
        self.cost += message.bytes().len() + OVERHEAD;
        self.queue.push_back(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_peeked_in_order_in_pieces_of_any_size() {
        let mut output = OutputQueue::default();
        output.push_reply(b"reply".to_vec());
        assert!(output.push_event(b"event"));
        output.push_reply(b"more".to_vec());
        let mut seen = Vec::new();
        while !output.is_empty() {
            let mut piece = [0; 3];
            let filled = output.peek(&mut piece);
            let taken = filled.min(2);
            seen.extend_from_slice(&piece[..taken]);
            output.advance(taken);
        }
        assert_eq!(seen, b"replyeventmore");
        assert_eq!(output.cost(), 0);
    }

    #[test]
    fn xsa_349_equal_waiting_events_are_merged() {
        let mut output = OutputQueue::default();
        assert!(output.push_event(b"a"));
        assert!(output.push_event(b"b"));
        let cost = output.cost();
        for _ in 0..1000 {
            assert!(!output.push_event(b"a"));
        }
        assert_eq!(output.cost(), cost);
        output.advance(1);
        assert!(output.push_event(b"a"), "the first one was sent in full, so a new one is queued");
    }
}
