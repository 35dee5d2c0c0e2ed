//! A daemon of `ringfence serve` without a hypervisor. The daemon is a domain of a hub, and the test plays the
//! toolstack and the guests.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringfence_driver::xen::status::{Snapshot, ask};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::DeviceId;
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};

pub const SOON: Duration = Duration::from_secs(60);
/// Domain of the daemon.
pub const DRIVER: DomId = DomId(1);

/// Waits until `done` returns `true`. Fails with `what` after [`SOON`].
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Hub with its toolstack and a daemon.
pub struct Lab {
    pub dir: tempfile::TempDir,
    pub hub: HubHandle,
    pub store: StoreClient,
    daemon: Child,
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        self.hub.stop();
        if std::thread::panicking() {
            eprintln!("the daemon said:\n{}", self.log());
        }
    }
}

fn listen(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 8).unwrap();
    socket
}

impl Lab {
    /// Starts a daemon. `prepare` writes the configuration and other files into the directory before.
    pub fn start(prepare: impl FnOnce(&Path)) -> Lab {
        Lab::start_as(&[env!("CARGO_BIN_EXE_ringfence")], prepare)
    }

    /// Starts a daemon, as [`Lab::start`] does, by `words` followed by the daemon's own arguments.
    pub fn start_as(words: &[&str], prepare: impl FnOnce(&Path)) -> Lab {
        let dir = tempfile::tempdir().unwrap();
        let (mut thread, hub) = Hub::new(HubLimits::default()).unwrap();
        thread.listen(listen(&dir.path().join("hub.sock"))).unwrap();
        std::thread::spawn(move || thread.run().unwrap());
        let (_, socket) = hub.admit(Some(DomId(0)), true).unwrap();
        let mut store = LocalPlatform::connect(socket).unwrap().store().unwrap();
        // The daemon becomes the next domain. As on Xen, it may read its own directory.
        let own = format!("/local/domain/{}", DRIVER.0);
        store.mkdir(&own).unwrap();
        store.set_perms(&own, &PermissionList::owned_by(DomId(0), NodeAccess::Read)).unwrap();
        prepare(dir.path());
        let log = fs::File::create(dir.path().join("log")).unwrap();
        // The caller may ignore signals (a background job, nohup), and children inherit that.
        let daemon = Command::new("env")
            .arg("--default-signal")
            .args(words)
            .arg("serve")
            .arg("--platform")
            .arg(format!("local:{}", dir.path().join("hub.sock").display()))
            .arg("--runtime-dir")
            .arg(dir.path().join("run"))
            .arg("--config")
            .arg(dir.path().join("ringfence.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let lab = Lab { dir, hub, store, daemon };
        wait_until("the daemon answers", || ask(&lab.socket()).is_ok());
        assert_eq!(lab.status().daemon.domain, DRIVER.0);
        lab
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("run/serve.sock")
    }

    pub fn status(&self) -> Snapshot {
        ask(&self.socket()).unwrap()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Returns the process id of the daemon.
    pub fn pid(&self) -> u32 {
        self.daemon.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.daemon.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Writes a key into a device's backend directory, as the toolstack does.
    pub fn write(&mut self, device: &DeviceId, key: &str, value: &str) {
        self.store.write(&format!("{}/{key}", device.backend_path()), value).unwrap();
    }
}
