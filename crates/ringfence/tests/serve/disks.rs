//! Disks of `ringfence serve` without a hypervisor. The daemon is a domain of a hub, and the test is the toolstack
//! and the guests.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::require;
use crate::support::lab::{DRIVER, Lab, wait_until};
use crate::support::needs::Need;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::file::check_uring;
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::testing::Driver;
use ringfence_block::storage::{Disk, Geometry, Op};
use ringfence_block::vbd::frontend::VbdFrontend;
use ringfence_driver::xen::status::VbdStatus;
use ringfence_nbd::export::{Export, ExportOptions};
use ringfence_platform::Platform;
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_sys::byte_lock;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenbus::toolstack::DeviceEntries;
use ringfence_xenstore::{StoreAccess, StoreClient};
use rustix::process::Signal;

const XVDA: u32 = 51712;

fn configure(dir: &Path, lines: &str) {
    // Keys of [disks] come first, because the lines of a test may begin with more of them.
    let images = dir.join("images");
    let text = format!("[disks]\npaths = ['{}']\n{lines}\n", images.display());
    fs::write(dir.join("ringfence.toml"), text).unwrap();
}

impl Lab {
    /// Starts a daemon whose disks may be in the folder `images`.
    fn of_disks(lines: &str) -> Lab {
        Lab::start(|dir| {
            fs::create_dir(dir.join("images")).unwrap();
            configure(dir, lines);
        })
    }

    fn row(&self, of: &Guest) -> VbdStatus {
        let disks = self.status().disks;
        disks.into_iter().find(|disk| disk.domain == of.device.frontend.0).unwrap_or_default()
    }

    fn vbd_counter(&self, of: &Guest, name: &str) -> u64 {
        self.row(of).queues.iter().filter_map(|queue| queue.counters.get(name)).sum()
    }

    /// Creates a file in the folder of disks.
    fn image(&self, name: &str, bytes: usize) -> PathBuf {
        let path = self.dir.path().join("images").join(name);
        fs::write(&path, vec![0; bytes]).unwrap();
        path
    }

    fn key(&mut self, of: &Guest, key: &str) -> Option<String> {
        let path = format!("{}/{key}", of.device.backend_path());
        self.store.read_opt(&path).unwrap().map(|text| String::from_utf8(text).unwrap())
    }

    /// Writes a key into a device's backend directory, as the toolstack does.
    fn write_vbd(&mut self, of: &Guest, key: &str, value: &str) {
        self.write(&of.device, key, value);
    }

    /// Runs `ringfence disk` with the daemon's socket. Returns its status and its output.
    fn disk_command(&self, words: &[&str]) -> (Option<i32>, String) {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ringfence"));
        command.arg("disk").args(words).arg("--socket").arg(self.socket());
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    }

    /// Creates a guest with a disk as libxl does, with these additional keys.
    fn disk_guest(&mut self, keys: &[(&str, &str)]) -> Guest {
        let (_, socket) = self.hub.admit(None, false).unwrap();
        let platform = LocalPlatform::connect(socket).unwrap();
        let platform = platform.with_arena(ArenaShape::of(2048, 2048));
        let device = DeviceId {
            kind: DeviceKind::Vbd,
            frontend: platform.domid(),
            backend: DRIVER,
            handle: XVDA,
        };
        let front = [("virtual-device", XVDA.to_string()), ("device-type", "disk".to_owned())];
        let libxl = [
            ("mode", "w"),
            ("type", "phy"),
            ("dev", "xvda"),
            ("removable", "0"),
            ("discard-enable", "1"),
            ("script", "/etc/xen/scripts/block-ringfence"),
        ];
        let mut back: Vec<_> = libxl.map(|(key, value)| (key, value.to_owned())).to_vec();
        for (key, value) in keys {
            back.retain(|(known, _)| known != key);
            back.push((key, (*value).to_owned()));
        }
        let entries = DeviceEntries { frontend: &front, backend: &back };
        ringfence_xenbus::toolstack::create(&mut self.store, &device, entries).unwrap();
        let options = BlkfrontOptions { queues: 2, ring_order: 1, ..BlkfrontOptions::default() };
        let front = VbdFrontend::new(&platform, device, options, Arc::new(|| {})).unwrap();
        let store = platform.store().unwrap();
        Guest { platform, store, front, device }
    }
}

struct Guest {
    platform: LocalPlatform,
    store: StoreClient,
    front: VbdFrontend<LocalPlatform>,
    device: DeviceId,
}

impl Guest {
    fn look(&mut self) {
        self.front.look(&self.platform, &mut self.store).unwrap();
    }

    fn connect(&mut self) {
        wait_until("a guest connects", || {
            self.look();
            self.front.is_up()
        });
    }

    fn geometry(&self) -> Geometry {
        self.front.disk().unwrap().geometry()
    }

    fn driver(&self) -> Driver {
        Driver::new(self.front.disk().unwrap().queue(8).unwrap())
    }

    fn back_state(&mut self) -> Option<XenbusState> {
        let path = format!("{}/state", self.device.backend_path());
        XenbusState::parse(&self.store.read_opt(&path).ok()??).ok()
    }
}

#[test]
fn disk_of_engine_threads_is_served_by_threads() {
    let mut lab = Lab::of_disks("engine = 'threads'");
    let image = lab.image("a", 1 << 20);
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    guest.connect();
    guest.driver().write(0, &[1; 4096]).unwrap();
    assert_eq!(lab.row(&guest).engine.as_deref(), Some("threads"));
}

#[test]
fn file_is_served_and_reported_to_toolstack() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 1 << 20);
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    guest.connect();
    assert_eq!(lab.key(&guest, "disk-status").as_deref(), Some("open"));
    let geometry = guest.geometry();
    assert_eq!((geometry.bytes, geometry.sector_size, geometry.read_only), (1 << 20, 512, false));
    let mut driver = guest.driver();
    driver.write(4096, &[7; 8192]).unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    assert_eq!(fs::read(&image).unwrap()[4095..12289].iter().filter(|b| **b == 7).count(), 8192);
    let row = lab.row(&guest);
    assert_eq!((row.vdev.as_deref(), row.storage.as_deref()), (Some("xvda"), image.to_str()));
    let engine = if check_uring().is_ok() { "io_uring" } else { "threads" };
    assert_eq!(row.engine.as_deref(), Some(engine));
    assert!(row.connected && row.persistent && !row.adopted, "{row:?}");
    assert_eq!((row.queues.len(), row.ring_pages, row.bytes), (2, Some(2), Some(1 << 20)));
    assert_eq!(lab.vbd_counter(&guest, "written_bytes"), 8192);
    assert!(lab.vbd_counter(&guest, "flushes") > 0);
    // No other guest gets the disk.
    let error = ringfence_block::storage::file::FileDisk::open(&image, &Default::default());
    assert!(matches!(error, Err(ringfence_block::storage::file::OpenFileError::InUse { .. })));
}

#[test]
fn unopenable_disk_is_reported_and_tried_again() {
    let mut lab = Lab::of_disks("");
    let outside = lab.dir.path().join("outside");
    fs::write(&outside, [0; 8192]).unwrap();
    let mut guest = lab.disk_guest(&[("params", outside.to_str().unwrap())]);
    wait_until("the toolstack is told", || {
        lab.key(&guest, "disk-status").is_some_and(|text| text.contains("`paths` in [disks]"))
    });
    guest.look();
    wait_until("it is announced all the same", || {
        guest.back_state() == Some(XenbusState::InitWait)
    });
    assert!(lab.row(&guest).problem.unwrap().contains("not below a folder"));
    // The toolstack changes the keys.
    let image = lab.image("late", 8192);
    fs::remove_file(&image).unwrap();
    lab.write_vbd(&guest, "params", image.to_str().unwrap());
    wait_until("it is looked for", || {
        lab.key(&guest, "disk-status").is_some_and(|text| text.contains("No such file"))
    });
    guest.look();
    let image = lab.image("late", 8192);
    guest.connect();
    wait_until("it is open, and that is said", || {
        lab.key(&guest, "disk-status").as_deref() == Some("open")
            && lab.row(&guest).problem.is_none()
    });
    assert_eq!(guest.geometry().bytes, fs::metadata(image).unwrap().len());
}

#[test]
fn keys_and_configuration_set_properties_of_disk() {
    let mut lab = Lab::of_disks(
        "mode = 'map'\nmax-queues = 1\nring-page-order = 0\n\
         [[disk]]\nvdev = 'xvdb'\nsector-size = 4096\nmode = 'copy'\n\
         [limits]\ndisks-per-domain = 1",
    );
    let image = lab.image("a", 1 << 20);
    let path = image.to_str().unwrap();
    let mut reader = lab.disk_guest(&[("params", path), ("mode", "r")]);
    reader.connect();
    assert!(reader.geometry().read_only);
    let row = lab.row(&reader);
    assert_eq!((row.mode.as_str(), row.persistent, row.read_only), ("map", false, true));
    assert_eq!((row.queues.len(), row.ring_pages), (1, Some(1)));
    // Two guests may read a disk that neither can write to.
    let mut other = lab.disk_guest(&[("params", path), ("mode", "r"), ("dev", "xvdb")]);
    other.connect();
    assert_eq!(other.geometry().sector_size, 4096);
    assert_eq!(lab.row(&other).mode, "copy");
    assert_eq!(other.driver().read(0, 4096).unwrap(), [0; 4096]);
}

#[test]
fn device_of_other_script_is_served() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 8192);
    let keys = [("params", "iqn.2001:a"), ("script", "/etc/xen/scripts/block-iscsi")];
    let mut guest = lab.disk_guest(&keys);
    wait_until("it waits", || lab.row(&guest).problem.is_some_and(|why| why.contains("script")));
    assert_eq!(guest.back_state(), Some(XenbusState::InitWait), "the toolstack waits for that");
    lab.write_vbd(&guest, "physical-device-path", image.to_str().unwrap());
    guest.connect();
    assert_eq!(guest.geometry().bytes, 8192);
}

#[test]
fn nbd_server_is_served_as_disk() {
    let mut lab = Lab::of_disks("");
    let socket = lab.dir.path().join("images/nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let memory: Arc<dyn Disk> = Arc::new(MemoryDisk::new(1 << 20, 512).unwrap());
    let _export = Export::start(listener, &memory, ExportOptions::default()).unwrap();
    let address = format!("nbd+unix:///?socket={}", socket.display());
    let mut guest = lab.disk_guest(&[("params", &address)]);
    guest.connect();
    let mut driver = guest.driver();
    driver.write(512, &[9; 1024]).unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    assert_eq!(Driver::new(memory.queue(1).unwrap()).read(512, 1024).unwrap(), [9; 1024]);
    assert_eq!(lab.row(&guest).storage, Some(address));
    assert_eq!(lab.row(&guest).queues.len(), 1, "one connection keeps the order of writes");
}

#[test]
fn reloaded_configuration_applies_to_next_connection() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 8192);
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    guest.connect();
    configure(lab.dir.path(), "mode = 'copy'\nsector-size = 4096");
    lab.signal(Signal::HUP);
    wait_until("it is read", || {
        lab.log().contains("disks.mode for devices that connect from now on")
    });
    let mut driver = guest.driver();
    driver.write(512, &[1; 512]).unwrap();
    assert!(lab.row(&guest).persistent, "who is connected keeps what it has");
    guest.front.close(&mut guest.store).unwrap();
    wait_until("it is let go of", || !lab.row(&guest).connected);
    let state = format!("{}/state", guest.device.frontend_path());
    guest.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    wait_until("it is announced", || guest.back_state() == Some(XenbusState::InitWait));
    wait_until("its sectors are larger", || lab.row(&guest).sector_size == Some(4096));
    assert_eq!(lab.key(&guest, "feature-persistent").as_deref(), Some("0"));
}

#[test]
fn frontend_that_vanished_finds_disk_connected() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 8192);
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    guest.connect();
    let state = format!("{}/state", guest.device.frontend_path());
    guest.store.write(&state, XenbusState::Closed.to_string()).unwrap();
    wait_until("it is let go of", || !lab.row(&guest).connected);
    wait_until("it is waited for", || {
        guest.back_state() == Some(XenbusState::Connected) && !lab.row(&guest).connected
    });
    // A frontend that starts in the regular way is not mistaken for the earlier one.
    guest.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    wait_until("it is announced", || guest.back_state() == Some(XenbusState::InitWait));
    guest.connect();
    guest.driver().write(0, &[1; 512]).unwrap();
}

#[test]
fn removed_device_is_forgotten_and_its_file_unlocked() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 8192);
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    guest.connect();
    guest.driver().write(0, &[1; 512]).unwrap();
    let file = fs::File::open(&image).unwrap();
    let locked = || {
        // Permissions to read and to write, and those that QEMU may not have beside them.
        [100, 101, 201, 203].map(|byte| byte_lock::is_locked_elsewhere(&file, byte).unwrap())
    };
    assert_eq!(locked(), [true; 4], "QEMU can see that the disk is in use");
    ringfence_xenbus::toolstack::remove(&mut lab.store, &guest.device).unwrap();
    wait_until("it is forgotten", || lab.status().disks.is_empty());
    let daemon = lab.status().daemon;
    assert_eq!(daemon.disks.gone.get("writes"), Some(&1));
    // The queues leave after the row is gone, and unmap their rings and pages then.
    wait_until("nothing is mapped", || {
        let path = lab.status().daemon.path;
        // A counter that is zero is not there.
        path.contains_key("grant_maps") && path.get("grant_maps") == path.get("grant_unmaps")
    });
    let options = ringfence_block::storage::file::FileOptions::default();
    wait_until("its last write is over", || locked() == [false; 4]);
    assert!(ringfence_block::storage::file::FileDisk::open(&image, &options).is_ok());
}

#[test]
fn disk_with_locks_of_qemu_is_opened_once_they_end() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 8192);
    let qemu = fs::File::open(&image).unwrap();
    byte_lock::lock(&qemu, 101).unwrap();
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    wait_until("the wait is reported", || lab.log().contains("in use by QEMU"));
    assert_ne!(lab.key(&guest, "disk-status").as_deref(), Some("open"));
    drop(qemu);
    guest.connect();
    guest.driver().write(0, &[1; 512]).unwrap();
}

#[test]
fn image_of_another_format_is_reported_and_left_unchanged() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 8192);
    let mut content = vec![0; 8192];
    content[..4].copy_from_slice(b"QFI\xfb");
    fs::write(&image, &content).unwrap();
    let guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    wait_until("the toolstack is told", || {
        lab.key(&guest, "disk-status").is_some_and(|text| text.contains("qcow2 image"))
    });
    assert_eq!(fs::read(&image).unwrap(), content);
}

#[test]
fn qcow2_image_of_target_is_served_with_its_base() {
    let need = crate::support::needs::Need::Program("qemu-img", "qemu-utils");
    if let Some(reason) = need.missing() {
        crate::support::needs::skip_for(need, &reason);
        return;
    }
    let mut lab = Lab::of_disks("");
    let base = lab.image("base", 1 << 20);
    fs::write(&base, vec![3; 1 << 20]).unwrap();
    let image = lab.image("image", 0);
    let words = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw"];
    let made = std::process::Command::new("qemu-img").args(words).arg(&image).status();
    assert!(made.unwrap().success());
    let mut guest = lab.disk_guest(&[("params", &format!("qcow2:{}", image.display()))]);
    guest.connect();
    assert_eq!(guest.geometry().bytes, 1 << 20);
    let mut driver = guest.driver();
    assert_eq!(driver.read(4096, 512), Ok(vec![3; 512]));
    driver.write(4096, &[7; 512]).unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    assert_eq!(driver.read(4096, 1024), Ok([[7; 512], [3; 512]].concat()));
    assert_eq!(fs::read(&base).unwrap(), vec![3; 1 << 20]);
}

#[test]
fn snapshot_of_target_is_named_in_params_and_served_after_the_guest_returns() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 1 << 20);
    let new = lab.dir.path().join("images/new.qcow2");
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap())]);
    guest.connect();
    let mut driver = guest.driver();
    driver.write(0, &[1; 4096]).unwrap();
    let domain = guest.device.frontend.0.to_string();
    let (status, text) = lab.disk_command(&["snapshot", &domain, "xvda", new.to_str().unwrap()]);
    assert_eq!(status, Some(0), "{text}");
    let params = format!("qcow2:{}", new.display());
    assert!(text.contains(&format!("target={params}")), "{text}");
    assert_eq!(lab.key(&guest, "params"), Some(params.clone()));
    driver.write(4096, &[2; 4096]).unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    let below = [vec![1; 4096], vec![0; (1 << 20) - 4096]].concat();
    assert!(fs::read(&image).unwrap() == below, "nothing is written below the overlay");
    let row = lab.row(&guest);
    assert_eq!((row.storage.as_deref(), row.format.as_deref()), (new.to_str(), Some("qcow2")));
    assert_eq!(row.engine, None, "threads without a choice");
    // Nobody gets the file for writing, and readers do.
    let options =
        |read_only| ringfence_block::storage::file::FileOptions { read_only, ..Default::default() };
    let file = fs::File::open(&image).unwrap();
    assert!(byte_lock::is_locked_elsewhere(&file, 201).unwrap(), "it denies writers");
    assert!(!byte_lock::is_locked_elsewhere(&file, 101).unwrap(), "it writes no more");
    assert!(ringfence_block::storage::file::FileDisk::open(&image, &options(true)).is_ok());
    // The next connection of the guest, and a daemon that takes over, find the overlay.
    guest.front.close(&mut guest.store).unwrap();
    wait_until("it is let go of", || !lab.row(&guest).connected);
    let state = format!("{}/state", guest.device.frontend_path());
    guest.store.write(&state, XenbusState::Initialising.to_string()).unwrap();
    // A frontend that finds the backend closed would leave.
    wait_until("it is announced", || guest.back_state() == Some(XenbusState::InitWait));
    guest.connect();
    assert_eq!(guest.driver().read(0, 8192).unwrap(), [[1; 4096], [2; 4096]].concat());
    assert_eq!(lab.row(&guest).storage.as_deref(), new.to_str());
}

#[test]
fn file_below_a_snapshot_is_not_served_to_a_rebooted_domain() {
    require!(Need::Attributes);
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 1 << 20);
    let new = lab.dir.path().join("images/new.qcow2");
    let keys = [("params", image.to_str().unwrap())];
    let mut guest = lab.disk_guest(&keys);
    guest.connect();
    let domain = guest.device.frontend.0.to_string();
    let (status, text) = lab.disk_command(&["snapshot", &domain, "xvda", new.to_str().unwrap()]);
    assert_eq!(status, Some(0), "{text}");
    ringfence_xenbus::toolstack::remove(&mut lab.store, &guest.device).unwrap();
    // The toolstack has the configuration of before.
    let rebooted = lab.disk_guest(&keys);
    wait_until("the toolstack is told", || {
        let why = format!("is below {}", new.display());
        lab.key(&rebooted, "disk-status").is_some_and(|text| text.contains(&why))
    });
    let reader = lab.disk_guest(&[("params", image.to_str().unwrap()), ("mode", "r")]);
    wait_until("a reader has it", || lab.key(&reader, "disk-status").as_deref() == Some("open"));
}

#[test]
fn enlarged_file_reaches_a_connected_guest() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 1 << 20);
    let mut guest = lab.disk_guest(&[("params", image.to_str().unwrap()), ("dev", "xvdb")]);
    guest.connect();
    let mut driver = guest.driver();
    let domain = guest.device.frontend.0.to_string();
    let (status, text) = lab.disk_command(&["resize", &domain]);
    assert!(status == Some(125) && text.contains("enlarge that first"), "{text}");
    assert_eq!(lab.disk_command(&["resize", &domain, "xvdb", "2M"]).0, Some(0));
    wait_until("the frontend has the size", || {
        guest.look();
        guest.geometry().bytes == 2 << 20
    });
    assert_eq!(lab.key(&guest, "sectors").as_deref(), Some("4096"));
    assert_eq!(guest.back_state(), Some(XenbusState::Connected));
    driver.write((2 << 20) - 512, &[4; 512]).unwrap();
    driver.run(Op::Flush, 0, 0, vec![]).result.unwrap();
    assert_eq!(fs::read(&image).unwrap()[(2 << 20) - 512..], [4; 512]);
    let engine = if check_uring().is_ok() { "io_uring" } else { "threads" };
    assert_eq!(lab.row(&guest).engine.as_deref(), Some(engine), "the rings are used again");
    fs::File::options().write(true).open(&image).unwrap().set_len(3 << 20).unwrap();
    let (status, text) = lab.disk_command(&["resize", &domain, "xvdb"]);
    assert!(status == Some(0) && text.contains(&(3 << 20).to_string()), "{text}");
    assert_eq!(lab.row(&guest).bytes, Some(3 << 20));
}

#[test]
fn change_of_disk_that_is_refused_says_why_and_changes_nothing() {
    let mut lab = Lab::of_disks("");
    let image = lab.image("a", 1 << 20);
    let keys = [("params", "iqn"), ("script", "/etc/xen/scripts/block-iscsi")];
    let mut scripted = lab.disk_guest(&keys);
    lab.write_vbd(&scripted, "physical-device-path", image.to_str().unwrap());
    scripted.connect();
    let domain = scripted.device.frontend.0.to_string();
    let new = |name: &str| lab.dir.path().join("images").join(name).display().to_string();
    let refused = |words: &[&str], why: &str| {
        let (status, text) = lab.disk_command(words);
        assert!(status == Some(125) && text.contains(why), "{words:?}: {text}");
    };
    refused(&["snapshot", &domain, "xvda", &new("n")], "script");
    refused(&["snapshot", &domain, "xvdz", &new("n")], "no such disk: xvda");
    refused(&["snapshot", "999", &new("n")], "`999`");
    refused(&["snapshot", &domain, &new("a")], "exists already");
    let outside = lab.dir.path().join("outside.qcow2").display().to_string();
    refused(&["snapshot", &domain, &outside], "script");
    assert!(!Path::new(&new("n")).exists() && !Path::new(&outside).exists());
    scripted.driver().write(0, &[1; 512]).unwrap();
    let second = lab.image("b", 1 << 20);
    let mut guest = lab.disk_guest(&[("params", second.to_str().unwrap())]);
    guest.connect();
    let domain = guest.device.frontend.0.to_string();
    let (status, text) = lab.disk_command(&["snapshot", &domain, &outside]);
    assert!(status == Some(125) && text.contains("`paths` in [disks]"), "{text}");
    assert!(!Path::new(&outside).exists());
    assert_eq!(lab.key(&guest, "params").as_deref(), second.to_str());
    guest.driver().write(0, &[3; 512]).unwrap();
    guest.driver().run(Op::Flush, 0, 0, vec![]).result.unwrap();
    assert_eq!(fs::read(&second).unwrap()[..512], [3; 512], "the disk is where it was");
}
