//! Place of a queue's keys in the frontend's directory of the store.

use ringfence_xenbus::end::BackendEnd;

/// Place of the keys of one queue.
pub(super) struct QueueKeys {
    pub(super) queue: u32,
    /// Directory of the queue. A device without several queues has its keys in its own directory.
    pub(super) directory: Option<String>,
}

impl QueueKeys {
    /// Returns the path of the key `name`.
    pub(super) fn path(&self, end: &BackendEnd, name: &str) -> String {
        match &self.directory {
            Some(directory) => end.front(&format!("{directory}/{name}")),
            None => end.front(name),
        }
    }
}
