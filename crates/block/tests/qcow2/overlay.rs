//! Overlays that are created above a disk: valid for QEMU's programs, new files, and removed unless they are kept.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{
    CacheMode, FileDescription, FileDisk, FileOptions, OpenFileError,
};
use ringfence_block::storage::qcow2::{
    ChainError, ImageOptions, MemberFormat, OpenChain, Overlay, OverlayError, OverlaySpec, QcowDisk,
};
use ringfence_block::storage::testing::Driver;

use crate::{Place, no_process_starts, require_qemu};

fn spec(path: &Path, backing: &Path, format: MemberFormat, bytes: u64) -> OverlaySpec {
    OverlaySpec { path: path.to_owned(), backing: backing.to_owned(), format, bytes }
}

/// Creates an overlay and keeps it.
fn create(path: &Path, backing: &Path, format: MemberFormat, bytes: u64) {
    let _one = no_process_starts();
    Overlay::create(&spec(path, backing, format, bytes)).unwrap().keep();
}

#[test]
fn overlay_of_each_size_is_what_qemu_img_would_create() {
    require_qemu!();
    let place = Place::new();
    for (bytes, format) in [
        (512, MemberFormat::Raw),
        (1 << 20, MemberFormat::Qcow2),
        ((1 << 30) + 512, MemberFormat::Raw),
        (5 << 40, MemberFormat::Qcow2),
    ] {
        let (base, own, other) = (place.path("base"), place.path("own"), place.path("other"));
        let name = if format == MemberFormat::Raw { "raw" } else { "qcow2" };
        let size = bytes.to_string();
        place.succeed("qemu-img", &["create", "-q", "-f", name, "base", &size]);
        create(&own, &base, format, bytes);
        let words = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", name, "other"];
        place.succeed("qemu-img", &words);
        place.succeed("qemu-img", &["check", "-q", "own"]);
        let info = |file: &str| -> serde_json::Value {
            let text = place.succeed("qemu-img", &["info", "--output=json", file]);
            serde_json::from_str(&text).unwrap()
        };
        let (ours, theirs) = (info("own"), info("other"));
        for key in [
            "virtual-size",
            "cluster-size",
            "format",
            "backing-filename",
            "backing-filename-format",
            "full-backing-filename",
        ] {
            assert_eq!(ours[key], theirs[key], "{bytes}: {key}");
        }
        let features = &ours["format-specific"]["data"];
        assert_eq!(features["compat"], "1.1");
        assert_eq!(features["refcount-bits"], 16);
        assert_eq!(features["corrupt"], false);
        // It is served, and QEMU's programs read what was written.
        let options = ImageOptions {
            file: FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() },
            ..ImageOptions::default()
        };
        {
            let _one = no_process_starts();
            let chain = OpenChain::open(&own, &options, &|_| {}).unwrap();
            let disk = QcowDisk::new(chain, &options.file).unwrap();
            assert_eq!(disk.geometry().bytes, bytes);
            Driver::new(disk.queue(4).unwrap()).write(bytes - 512, &[5; 512]).unwrap();
        }
        place.succeed("qemu-img", &["check", "-q", "own"]);
        let read = format!("read -P 5 {} 512", bytes - 512);
        place.succeed("qemu-io", &["-r", "-f", "qcow2", "-c", &read, "own"]);
        for file in [base, own, other] {
            fs::remove_file(file).unwrap();
        }
    }
}

#[test]
fn overlay_is_a_new_file_and_follows_no_link() {
    let place = Place::new();
    let (base, new) = (place.path("base"), place.path("new"));
    fs::write(&base, [1; 4096]).unwrap();
    let refused = |path: &Path| Overlay::create(&spec(path, &base, MemberFormat::Raw, 4096));
    let exists = |path: &Path| matches!(refused(path), Err(OverlayError::Exists { .. }));
    assert!(exists(&base), "the disk itself");
    symlink("nowhere", &new).unwrap();
    assert!(exists(&new), "a link that leads nowhere");
    assert!(!place.path("nowhere").exists());
    fs::remove_file(&new).unwrap();
    symlink("base", &new).unwrap();
    assert!(exists(&new), "a link to the disk");
    fs::remove_file(&new).unwrap();
    fs::create_dir(&new).unwrap();
    assert!(exists(&new));
    fs::remove_dir(&new).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &new,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(exists(&new));
    fs::remove_file(&new).unwrap();
    for wrong in [place.path("missing/new"), place.path("new/.."), place.path("/")] {
        assert!(refused(&wrong).is_err(), "{}", wrong.display());
    }
    assert!(Overlay::create(&spec(&new, &place.path("missing"), MemberFormat::Raw, 4096)).is_err());
    assert!(!new.exists());
    assert_eq!(fs::read(&base).unwrap(), [1; 4096]);
}

#[test]
fn overlay_that_is_not_kept_is_removed() {
    let place = Place::new();
    let (base, new) = (place.path("base"), place.path("new"));
    fs::write(&base, [1; 4096]).unwrap();
    fs::set_permissions(&base, fs::Permissions::from_mode(0o640)).unwrap();
    let overlay = Overlay::create(&spec(&new, &base, MemberFormat::Raw, 4096)).unwrap();
    assert_eq!(fs::metadata(&new).unwrap().permissions().mode() & 0o777, 0o640);
    drop(overlay);
    assert!(!new.exists());
    // A disk of a size that no image has.
    let refused = Overlay::create(&spec(&new, &base, MemberFormat::Raw, (1 << 51) + 512));
    assert!(matches!(refused, Err(OverlayError::Size { .. })), "{refused:?}");
    assert!(!new.exists());
    // Another file at the path of an overlay that was kept stays.
    let overlay = Overlay::create(&spec(&new, &base, MemberFormat::Raw, 4096)).unwrap();
    overlay.keep();
    assert!(new.exists());
}

#[test]
fn file_below_an_overlay_is_opened_for_writing_only_when_the_overlay_is_gone() {
    let place = Place::new();
    let (base, new, copy) = (place.path("base"), place.path("new"), place.path("copy"));
    fs::write(&base, [1; 4096]).unwrap();
    fs::write(&copy, [1; 4096]).unwrap();
    let _one = no_process_starts();
    let overlay = Overlay::create(&spec(&new, &base, MemberFormat::Raw, 4096)).unwrap();
    if let Some(error) = &overlay.unmarked {
        println!("SKIPPED: files have no extended attributes here: {error}");
        return;
    }
    overlay.keep();
    let options = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
    let open = |path: &Path| FileDisk::open(path, &options);
    let is_refused = |path: &Path| matches!(open(path), Err(OpenFileError::BelowOverlay { .. }));
    let refusal = open(&base).err().unwrap().to_string();
    assert!(refusal.contains(new.to_str().unwrap()) && refusal.contains("qcow2"), "{refusal}");
    let described = FileDescription::of(&base, &options).unwrap().refusal;
    assert!(matches!(described, Some(OpenFileError::BelowOverlay { .. })), "{described:?}");
    // It is read, and its guest goes on with it if the overlay was not taken.
    let read_only = FileOptions { read_only: true, ..options.clone() };
    assert!(FileDisk::open(&base, &read_only).is_ok());
    assert!(FileDescription::of(&base, &read_only).unwrap().refusal.is_none());
    assert!(FileDisk::open(&base, &FileOptions { in_use: true, ..options.clone() }).is_ok());
    // The overlay itself has none above it, until the next snapshot.
    let image = ImageOptions { file: options.clone(), any_folder: false };
    assert!(OpenChain::open(&new, &image, &|_| {}).is_ok());
    create_locked(&place.path("newer"), &new);
    let refused = OpenChain::open(&new, &image, &|_| {}).err().unwrap();
    assert!(matches!(refused, ChainError::File(OpenFileError::BelowOverlay { .. })), "{refused}");
    assert!(OpenChain::describe(&new, &image).is_err());
    // A copy with the same attribute is another file.
    let mut value = [0; 4096];
    let length = rustix::fs::getxattr(&base, "user.ringfence.overlay", &mut value[..]).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&copy, "user.ringfence.overlay", &value[..length], flags).unwrap();
    assert!(open(&copy).is_ok());
    // An image that cannot be examined may be above the file; another file of its name is not.
    let content = fs::read(&new).unwrap();
    let damaged = [&content[..4], &[9; 508]].concat();
    fs::write(&new, damaged).unwrap();
    assert!(is_refused(&base));
    fs::write(&new, [0; 4096]).unwrap();
    assert!(open(&base).is_ok());
    fs::write(&new, &content).unwrap();
    assert!(is_refused(&base));
    fs::rename(&new, place.path("moved")).unwrap();
    assert!(open(&base).is_ok());
}

#[test]
fn name_with_a_colon_or_in_another_folder_is_found_again() {
    let place = Place::new();
    let folder = place.path("folder");
    fs::create_dir(&folder).unwrap();
    let options = |any_folder| ImageOptions {
        file: FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() },
        any_folder,
    };
    for (backing, new, needs_any) in [
        (place.path("a:b"), place.path("new"), false),
        (place.path("json:{}"), place.path("new:2"), false),
        (folder.join("base"), place.path("above"), false),
        (place.path("base"), folder.join("below"), true),
    ] {
        fs::write(&backing, [6; 8192]).unwrap();
        let _one = no_process_starts();
        let overlay = Overlay::create(&spec(&new, &backing, MemberFormat::Raw, 8192)).unwrap();
        assert_eq!(overlay.needs_any_folder, needs_any, "{}", new.display());
        assert_eq!(OpenChain::open(&new, &options(false), &|_| {}).is_ok(), !needs_any);
        let chain = OpenChain::open(&new, &options(true), &|_| {}).unwrap();
        let disk = QcowDisk::new(chain, &FileOptions::default()).unwrap();
        assert_eq!(Driver::new(disk.queue(1).unwrap()).read(4096, 512).unwrap(), [6; 512]);
    }
    let long = place.path(&"n".repeat(200)).join("x".repeat(200));
    let deep = (0..6).fold(place.path(""), |path, _| path.join("d".repeat(200)));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("base"), [1; 4096]).unwrap();
    let refused =
        Overlay::create(&spec(&folder.join("n"), &deep.join("base"), MemberFormat::Raw, 4096));
    assert!(matches!(refused, Err(OverlayError::Backing { .. })), "{refused:?}");
    assert!(!folder.join("n").exists() && !long.exists());
}

#[test]
fn chain_above_a_disk_in_use_locks_its_files_when_the_disk_gives_up_its_own() {
    let place = Place::new();
    let (base, new) = (place.path("base"), place.path("new"));
    fs::write(&base, [1; 8192]).unwrap();
    let _one = no_process_starts();
    let file = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
    let disk = FileDisk::open(&base, &file).unwrap();
    create_locked(&new, &base);
    let options = ImageOptions { file: file.clone(), any_folder: false };
    let (chain, locks) = OpenChain::open_above(&new, &options, None).unwrap();
    let same = [fs::File::open(&base).unwrap().into()];
    assert!(locks.are_of(&same));
    assert!(!locks.are_of(&[]) && !locks.are_of(&[fs::File::open(&new).unwrap().into()]));
    let live = disk.live().unwrap();
    live.become_backing().unwrap();
    locks.take().unwrap();
    drop(disk);
    let again = FileDisk::open(&base, &FileOptions { read_only: true, ..file.clone() });
    assert!(again.is_ok(), "readers share it");
    drop((again, locks));
    let disk = QcowDisk::new(chain, &file).unwrap();
    assert_eq!(Driver::new(disk.queue(1).unwrap()).read(0, 512).unwrap(), [1; 512]);
    assert!(
        disk.live().unwrap().resized(1 << 20).is_err() && disk.live().unwrap().enlarge(1).is_err()
    );
    // A second overlay, above an image.
    let third = place.path("third");
    Overlay::create(&spec(&third, &new, MemberFormat::Qcow2, 8192)).unwrap().keep();
    let (_chain, locks) = OpenChain::open_above(&third, &options, None).unwrap();
    disk.live().unwrap().become_backing().unwrap();
    locks.take().unwrap();
}

/// Creates an overlay while the caller prevents other processes.
fn create_locked(path: &Path, backing: &Path) {
    Overlay::create(&spec(path, backing, MemberFormat::Raw, 8192)).unwrap().keep();
}
