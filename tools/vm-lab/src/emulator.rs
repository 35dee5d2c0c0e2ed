//! QEMU and passt of another Debian release than this computer's, for `cargo xtask vm linux --qemu RELEASE`: their packages and
//! libraries are unpacked, not installed. Each program has a script of its name that starts it by the loader of its release.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::apt::{Apt, Release};
use super::build;
use super::kernel::{LOADER, in_root};

/// Packages with the emulator, whose firmware comes as a dependency, and with the backends of disks and network cards.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-utils", "passt"];
const PROGRAMS: [&str; 3] = ["qemu-system-x86_64", "qemu-storage-daemon", "passt"];
const LIBRARIES: &str = "lib/x86_64-linux-gnu";
/// Folders of what the emulator loads into a machine.
const DATA: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// Unpacks the programs of a release below `cache`, unless they are there. Returns the folder of their scripts.
pub(crate) fn folder(release: Release, cache: &Path) -> anyhow::Result<PathBuf> {
    let cache = release.folder(cache);
    std::fs::create_dir_all(&cache)?;
    let _lock = build::lock(&cache, "emulator")?;
    let mut apt = Apt::of(Some(release), &cache)?;
    let packages = apt.with_lists(|apt| {
        let packages = apt.closure(&PACKAGES)?;
        apt.download(&packages)?;
        Ok(packages)
    })?;
    let files: Vec<&str> = packages.iter().map(|package| package.file.as_str()).collect();
    let state = files.join("\n") + include_str!("emulator.rs");
    let (root, scripts) = (cache.join("emulator"), cache.join("emulator/scripts"));
    let stamp = root.join("stamp");
    if std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(scripts);
    }
    println!("unpacking {} packages of QEMU and passt", packages.len());
    if root.exists() {
        std::fs::remove_dir_all(&root)?;
    }
    packages.iter().try_for_each(|package| apt.unpack(package, &root))?;
    std::fs::create_dir_all(&scripts)?;
    for program in PROGRAMS {
        let file = scripts.join(program);
        std::fs::write(&file, script(&root, program))?;
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755))?;
    }
    std::fs::write(stamp, state)?;
    Ok(scripts)
}

/// Returns the script that starts a program of the packages in `root`.
fn script(root: &Path, program: &str) -> String {
    // Older releases have libraries in both folders.
    let libraries = [root.join(LIBRARIES), root.join("usr").join(LIBRARIES)];
    let libraries = libraries.map(|folder| quoted(&folder)).join(":");
    let loader = quoted(&in_root(root, LOADER));
    let modules = quoted(&root.join("usr").join(LIBRARIES).join("qemu"));
    let file = quoted(&root.join("usr/bin").join(program));
    let data: String = match program.starts_with("qemu-system") {
        true => DATA.map(|folder| format!(" -L {}", quoted(&root.join(folder)))).concat(),
        false => String::new(),
    };
    format!(
        "#!/bin/sh\nQEMU_MODULE_DIR={modules} exec {loader} --library-path {libraries} {file}{data} \"$@\"\n"
    )
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use taskkit::exec::Cmd;

    use super::*;

    #[test]
    fn script_starts_the_program_of_its_root_by_the_loader_there() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("it's a root");
        let loader = root.join(LOADER);
        std::fs::create_dir_all(loader.parent().unwrap()).unwrap();
        std::fs::write(&loader, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n").unwrap();
        std::fs::set_permissions(&loader, PermissionsExt::from_mode(0o755)).unwrap();
        let file = folder.path().join("script");
        std::fs::write(&file, script(&root, "qemu-system-x86_64")).unwrap();
        let printed = Cmd::new("sh").args([&file]).args(["-m", "1 2"]).output(folder.path());
        let printed = printed.unwrap().unwrap();
        let lines: Vec<&str> = printed.lines().collect();
        let inside = |path: &str| root.join(path).display().to_string();
        assert_eq!(lines[2], inside("usr/bin/qemu-system-x86_64"));
        assert_eq!(lines[3..], ["-L", &inside(DATA[0]), "-L", &inside(DATA[1]), "-m", "1 2"]);
    }
}
