//! Disks on qcow2 images: `format=qcow2`, and `ringfence disk info`.

use std::fs;
use std::process::Command;

use ringfence_block::storage::file::check_uring;
use ringfence_block::storage::testing::{Driver, lent_with};
use ringfence_block::storage::{Disk, Op};
use rustix::process::{Signal, kill_process};

use crate::require;
use crate::support::disks::{URI, output_of, served, succeed};
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, eventually, sha256, write_noise};

const QEMU_IMG: Need = Need::Program("qemu-img", "qemu-utils");

/// Creates an image with a backing file of noise. Returns the path of the image.
fn image_with_base(lab: &Lab) -> String {
    let (base, image) = (lab.file("base"), lab.file("image"));
    write_noise(&base, 16);
    let (base, image) = (base.display().to_string(), image.display().to_string());
    succeed(&["qemu-img", "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image]);
    image
}

#[test]
fn copy_to_image_is_stored_above_its_base() {
    require!(Need::Guests, QEMU_IMG, Need::Program("nbdcopy", "libnbd-bin"));
    for mode in ["persistent", "copy"] {
        let lab = Lab::new();
        let image = image_with_base(&lab);
        let base = lab.file("base");
        let before = sha256(&base);
        let (content, first, back) = (lab.file("in"), lab.file("first"), lab.file("out"));
        write_noise(&content, 16);
        let script = format!(
            "nbdcopy {URI}0 {} && nbdcopy --flush {} {URI}0 && nbdcopy {URI}0 {}",
            first.display(),
            content.display(),
            back.display()
        );
        let options = format!("--disk {image},format=qcow2,mode={mode}");
        lab.script(&options, &script).succeed(MOMENT);
        assert_eq!(sha256(&first), before, "{mode}: the base shows through");
        assert_eq!(sha256(&back), sha256(&content), "{mode}");
        assert_eq!(sha256(&base), before, "{mode}: the base is unchanged");
        // The driver domain holds the image until it has detached the guest.
        let checked = || output_of(&["qemu-img", "check", "-q", "-f", "qcow2", &image]);
        assert!(eventually(MOMENT, || checked().0 == Some(0)), "{mode}: {:?}", checked());
        let content = content.display().to_string();
        succeed(&["qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", &content, &image]);
    }
}

#[test]
fn image_is_refused_with_reason_without_its_format_or_outside_its_folder() {
    require!(Need::Guests, QEMU_IMG);
    let lab = Lab::new();
    let image = image_with_base(&lab);
    let refused = |options: &str, why: &str| {
        let finished = lab.script(options, "true").finish(MOMENT);
        assert_eq!(finished.status, Some(125), "{options}");
        assert!(finished.stderr.contains(why), "{options}: {}", finished.stderr);
    };
    refused(&format!("--disk {image}"), "format=qcow2");
    let folder = lab.file("folder");
    fs::create_dir(&folder).unwrap();
    let inner = folder.join("image").display().to_string();
    let below = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", &image, "-F", "qcow2", &inner];
    succeed(&below);
    refused(&format!("--disk {inner},format=qcow2"), "outside the folder");
    lab.script(&format!("--disk {inner},format=qcow2,backing=any"), "true").succeed(MOMENT);
}

#[test]
fn driver_domain_killed_under_load_leaves_valid_image() {
    require!(Need::Guests, QEMU_IMG);
    let lab = Lab::new();
    let image = image_with_base(&lab);
    let write = Op::Write { fua: false };
    let (guest, disk) = served(&lab, &format!("{image},format=qcow2,cache=writeback"));
    let mut driver = Driver::new(disk.queue(16).unwrap());
    for number in 0..200u64 {
        driver.submit(write, (number * 37 % 256) << 16, 4096, vec![lent_with(&[7; 4096]).into()]);
        if number % 16 == 15 {
            driver.wait().unwrap();
        }
    }
    kill_process(guest.inner("driver").pid, Signal::KILL).unwrap();
    drop((driver, disk));
    guest.finish(MOMENT);
    // The kernel closes the image, and with it its lock, while the process ends.
    let checked = || output_of(&["qemu-img", "check", "-f", "qcow2", &image]);
    assert!(eventually(MOMENT, || matches!(checked().0, Some(0 | 3))), "{:?}", checked());
}

#[test]
fn disk_info_describes_chain_and_reason_of_refusal() {
    require!(QEMU_IMG);
    let lab = Lab::new();
    let image = image_with_base(&lab);
    let info = |words: &[&str]| {
        let output =
            Command::new(lab.program()).args(["disk", "info"]).args(words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), text)
    };
    let (status, text) = info(&[&image]);
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains(&format!("option: --disk {image},format=qcow2\n")), "{text}");
    assert!(text.contains("backing file: ") && text.contains("served: yes"), "{text}");
    assert!(text.contains("\nengine: threads\n"), "{text}");
    let (_, text) = info(&[&image, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["format"], "qcow2");
    assert_eq!(json["chain"][1]["format"], "raw");
    assert_eq!(json["size"], 16 << 20);
    succeed(&["qemu-img", "snapshot", "-c", "s", &image]);
    let (status, text) = info(&[&image]);
    assert_eq!(status, Some(1));
    assert!(text.contains("served: no: ") && text.contains("internal snapshots"), "{text}");
    let (status, text) = info(&[lab.file("base").to_str().unwrap()]);
    assert_eq!(status, Some(0), "{text}");
    let has_rings = check_uring().is_ok();
    let engine =
        if has_rings { "engine: io_uring\n" } else { "engine: threads (io_uring is refused" };
    assert!(text.contains(engine), "{text}");
    let base = lab.file("base").display().to_string();
    assert!(info(&[&format!("{base},engine=threads")]).1.contains("\nengine: threads\n"));
    let (status, text) = info(&[&format!("{base},engine=io_uring"), "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &json["served"]), (Some(i32::from(!has_rings)), &has_rings.into()));
    let both = format!("{image},format=qcow2,engine=io_uring");
    assert_eq!(info(&[&both]).0, Some(2), "threads serve images");
    assert!(info(&["/nonexistent"]).1.contains("served: no: "));
}
