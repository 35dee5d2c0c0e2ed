//! Test machine of local domains, and child processes that are domains.

#![allow(dead_code, reason = "not every test that includes this uses all of it")]

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::{DomId, Platform};
use ringfence_testkit::conformance;

/// Hub with a toolstack in domain 0.
pub(crate) struct Machine {
    pub(crate) hub: HubHandle,
    pub(crate) toolstack: LocalPlatform,
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Machine {
    pub(crate) fn new() -> Machine {
        let (hub_thread, hub) = Hub::new(HubLimits::default()).unwrap();
        std::thread::spawn(move || hub_thread.run().unwrap());
        let socket = hub.admit(Some(DomId(0)), true).unwrap().1;
        let toolstack = LocalPlatform::connect(socket).unwrap();
        conformance::prepare(&mut toolstack.store().unwrap(), DomId(0)).unwrap();
        Machine { hub, toolstack }
    }

    /// Ends domain 0 and creates another one.
    pub(crate) fn restart_toolstack(&mut self) {
        // Another domain stands in for a moment: the id is free only after the old domain is gone.
        let placeholder = self.guest();
        drop(std::mem::replace(&mut self.toolstack, placeholder));
        let socket = loop {
            match self.hub.admit(Some(DomId(0)), true) {
                Ok((_, socket)) => break socket,
                Err(_) => std::thread::yield_now(),
            }
        };
        self.toolstack = LocalPlatform::connect(socket).unwrap();
    }

    /// Creates a domain with a home in the store. Returns its id and its connection to the hub.
    pub(crate) fn guest_socket(&self) -> (DomId, OwnedFd) {
        let (id, socket) = self.hub.admit(None, false).unwrap();
        conformance::prepare(&mut self.toolstack.store().unwrap(), id).unwrap();
        (id, socket)
    }

    /// Creates a domain in this process.
    pub(crate) fn guest(&self) -> LocalPlatform {
        LocalPlatform::connect(self.guest_socket().1).unwrap()
    }
}

/// Environment variable that carries the task of a child process.
const TASK: &str = "RINGFENCE_TEST_ORDERS";

/// Starts this test program again to run the ignored test `name` alone, as the domain at the other
/// end of `socket`.
pub(crate) fn child(name: &str, task: &str, socket: OwnedFd) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--ignored"])
        .env(TASK, task)
        .stdin(Stdio::from(socket))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns the task of this child process and its platform.
pub(crate) fn task() -> (String, LocalPlatform) {
    let task = std::env::var(TASK).expect("started by the test that names this one");
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    (task, LocalPlatform::connect(socket).unwrap())
}
