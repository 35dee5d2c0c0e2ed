//! Child processes that end with their owner.

use std::ops::{Deref, DerefMut};
use std::process::Child;

/// Child process that is killed and waited for when the value is dropped. A child that has exited
/// already is only waited for.
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
    fn child_of_dropped_owner_is_gone() {
        let child = OwnedChild(Command::new("sleep").arg("1000000").spawn().unwrap());
        let path = format!("/proc/{}", child.id());
        assert!(std::path::Path::new(&path).exists());
        drop(child);
        assert!(!std::path::Path::new(&path).exists());
    }
}
