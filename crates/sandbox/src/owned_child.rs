//! Processes that end with whoever started them.

use std::ops::{Deref, DerefMut};
use std::process::Child;

/// A child process that is killed, and waited for, when this is dropped; gone already is as good. With a
/// launcher goes its guest.
#[derive(Debug)]
pub struct OwnedChild(pub Child);

impl Deref for OwnedChild {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for OwnedChild {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn it_ends_with_its_owner() {
        let child = OwnedChild(Command::new("sleep").arg("1000000").spawn().unwrap());
        let place = format!("/proc/{}", child.id());
        assert!(std::path::Path::new(&place).exists());
        drop(child);
        assert!(!std::path::Path::new(&place).exists());
    }
}
