//! `ringfence attach --disk` and `ringfence serve` at both ends of a vbd, without a hypervisor.

use ringfence_platform::DomId;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenbus::toolstack::DeviceEntries;

use super::attach::{DRIVER, World};
use crate::require;
use crate::support::needs::Need;
use crate::support::{MOMENT, Running, eventually, sha256, write_noise};

const XVDB: u32 = 51728;
const MIB: u64 = 1 << 20;

/// World with an image of noise, which is disk `xvdb` of domain 2.
fn world_with_disk(mode: &str) -> World {
    let mut world = World::new();
    let images = world.lab.file("images");
    std::fs::create_dir(&images).unwrap();
    let image = images.join("image");
    write_noise(&image, 16);
    let text = format!("[disks]\npaths = ['{}']\nmode = '{mode}'\n", images.display());
    std::fs::write(world.lab.file("serve.toml"), text).unwrap();
    let (kind, frontend) = (DeviceKind::Vbd, DomId(2));
    let device = DeviceId { kind, frontend, backend: DRIVER, handle: XVDB };
    let own = |words: &[(&'static str, &str)]| -> Vec<_> {
        words.iter().map(|(key, value)| (*key, (*value).to_owned())).collect()
    };
    let front = own(&[("virtual-device", "51728"), ("device-type", "disk")]);
    let back = own(&[
        ("mode", "w"),
        ("type", "phy"),
        ("dev", "xvdb"),
        ("removable", "0"),
        ("discard-enable", "1"),
        ("script", "/etc/xen/scripts/block-ringfence"),
        ("params", image.to_str().unwrap()),
    ]);
    world.create(&device, DeviceEntries { frontend: &front, backend: &back });
    world
}

impl World {
    fn attach_disk(&self, options: &[&str]) -> Running {
        let (platform, socket) = (self.platform(), self.lab.file("disk.sock"));
        let program = env!("CARGO_BIN_EXE_ringfence");
        let mut words = vec![program, "attach", "--platform", &platform, "--disk", "xvdb", "-v"];
        words.extend(["--socket", socket.to_str().unwrap()]);
        words.extend(options);
        let attach = self.lab.spawn(&words);
        attach.wait_for_error("connected");
        attach
    }

    /// Runs a program with the URI of the disk, and the words after it.
    fn with_disk(&self, program: &str, words: &[&str]) -> String {
        let uri = format!("nbd+unix:///?socket={}", self.lab.file("disk.sock").display());
        let words = [&[program, &uri], words].concat();
        self.lab.spawn(&words).succeed(MOMENT)
    }
}

#[test]
fn attached_disk_is_read_and_written_by_nbd_clients() {
    require!(
        Need::Root,
        Need::Program("nbdcopy", "libnbd-bin"),
        Need::Program("nbdinfo", "libnbd-bin")
    );
    for (mode, options, levels) in [
        ("persistent", &[][..], "no grant windows"),
        ("window", &["--windows", "--queues", "2"][..], "grant windows: reused "),
    ] {
        let world = world_with_disk(mode);
        let serve = world.serve(&[]);
        let attach = world.attach_disk(options);
        assert_eq!(world.with_disk("nbdinfo", &["--size"]).trim(), (16 * MIB).to_string());
        let (image, copy) = (world.lab.file("images/image"), world.lab.file("copy"));
        world.with_disk("nbdcopy", &[copy.to_str().unwrap()]);
        assert_eq!(sha256(&copy), sha256(&image));
        let [disk] = &world.status().disks[..] else { panic!("one disk") };
        assert!(disk.connected && disk.rules.is_empty(), "{disk:?}");
        rustix::process::kill_process(attach.pid(), rustix::process::Signal::USR1).unwrap();
        attach.wait_for_error(levels);
        assert_eq!(attach.end().status, Some(0));
        assert!(eventually(MOMENT, || world.status().disks.iter().all(|disk| !disk.connected)));
        assert_eq!(serve.end().status, Some(0));
        world.hub.end();
    }
}

#[test]
fn bytes_written_to_an_attached_disk_are_in_the_image() {
    require!(Need::Root, Need::Program("nbdcopy", "libnbd-bin"));
    let world = world_with_disk("persistent");
    let serve = world.serve(&[]);
    let attach = world.attach_disk(&[]);
    let noise = world.lab.file("noise");
    write_noise(&noise, 16);
    let uri = format!("nbd+unix:///?socket={}", world.lab.file("disk.sock").display());
    world.lab.spawn(&["nbdcopy", "--flush", noise.to_str().unwrap(), &uri]).succeed(MOMENT);
    assert_eq!(sha256(&world.lab.file("images/image")), sha256(&noise));
    assert_eq!(attach.end().status, Some(0));
    assert_eq!(serve.end().status, Some(0));
    world.hub.end();
}

#[test]
fn disk_that_does_not_exist_is_refused_with_those_that_do() {
    require!(Need::Root);
    let world = world_with_disk("persistent");
    let serve = world.serve(&[]);
    let platform = world.platform();
    let socket = world.lab.file("disk.sock");
    let words = ["attach", "--platform", &platform, "--disk", "xvdz", "--socket"];
    let words =
        [&[env!("CARGO_BIN_EXE_ringfence")], &words[..], &[socket.to_str().unwrap()]].concat();
    let refused = world.lab.spawn(&words).finish(MOMENT);
    assert_eq!(refused.status, Some(125));
    assert!(refused.stderr.contains("there is no disk xvdz; there is: xvdb"), "{}", refused.stderr);
    assert_eq!(serve.end().status, Some(0));
    world.hub.end();
}
