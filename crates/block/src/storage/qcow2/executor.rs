//! Image as storage whose requests threads execute.

// #syscall driver,disk,daemon preadv,pwritev: clusters of an image, from and to private memory

use super::disk::{Buffer, Image};
use crate::storage::threads::Executor;
use crate::storage::{Done, QueueEngine, Request};

impl Executor for Image {
    type Job = Request;
    type Buffers = Buffer;

    const THREAD: &'static str = "image";
    /// There is no choice of engines.
    const ENGINE: Option<QueueEngine> = None;

    fn admit(&self, request: Request) -> Result<Request, Done> {
        match self.check(&request) {
            Ok(()) => Ok(request),
            Err(errno) => Err(request.done(Err(errno))),
        }
    }

    fn execute(&self, request: Request, buffer: &mut Buffer) -> Done {
        let result = self.result_of(&request, buffer);
        request.done(result)
    }
}
