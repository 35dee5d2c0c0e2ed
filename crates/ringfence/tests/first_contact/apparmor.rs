//! Profiles of AppArmor in `dist/apparmor`: their rules, and the script that installs them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::needs::{find_program, skip_what_is_not_installed};
use ringfence_sys::prerequisite::APPARMOR_PROFILE;

/// Features of version 4, with which the rules are compiled on a kernel without AppArmor.
const FEATURES: &str = "/etc/apparmor.d/abi/4.0";

fn dist() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist").canonicalize().unwrap()
}

/// Compiles a file of profiles. Nothing is loaded.
fn parse(parser: &Path, file: &Path) -> Output {
    let mut command = Command::new(parser);
    command.args(["--skip-kernel-load", "--skip-cache"]);
    if Path::new(FEATURES).exists() {
        command.args(["--kernel-features", FEATURES]);
    }
    command.arg(file).output().unwrap()
}

#[test]
fn profiles_are_accepted_by_the_parser() {
    let Some(parser) = find_program("apparmor_parser") else {
        return skip_what_is_not_installed("apparmor_parser is not installed (Debian: apparmor)");
    };
    let directory = tempfile::tempdir().unwrap();
    let probe = directory.path().join("probe");
    fs::write(&probe, "abi <abi/4.0>,\nprofile probe {\n  userns,\n}\n").unwrap();
    if !parse(&parser, &probe).status.success() {
        return skip_what_is_not_installed("apparmor_parser knows no rules of version 4");
    }
    for name in ["ringfence", "ringfence-serve", "ringfence-pasta", "ringfence-passt"] {
        let parsed = parse(&parser, &dist().join("apparmor").join(name));
        assert!(parsed.status.success(), "{name}: {}", String::from_utf8_lossy(&parsed.stderr));
    }
}

#[test]
fn profile_of_the_program_permits_namespaces_and_has_the_name_in_messages() {
    let name = Path::new(APPARMOR_PROFILE).file_name().unwrap();
    let profile = fs::read_to_string(dist().join("apparmor").join(name)).unwrap();
    assert!(profile.contains("profile ringfence /usr/bin/ringfence flags=(unconfined) {"));
    assert!(profile.contains("\n  userns,\n"));
}

/// Runs the script that installs the profiles into `apparmor`.
fn install(apparmor: &Path, action: &str) {
    let mut script = Command::new(dist().join("apparmor-profiles"));
    script.arg(action).env("PROFILES", dist().join("apparmor")).env("APPARMOR", apparmor);
    // The kernel's profiles are not those of this test.
    script.env("PATH", "/usr/bin:/bin");
    let output = script.output().unwrap();
    assert!(output.status.success(), "{action}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn profiles_are_installed_as_links_and_removed_without_files_of_others() {
    if Path::new("/sys/kernel/security/apparmor").exists() {
        return skip_what_is_not_installed("the script would load profiles into this kernel");
    }
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    install(folder, "install");
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "AppArmor has no rules of version 4");
    fs::create_dir(folder.join("abi")).unwrap();
    fs::write(folder.join("abi/4.0"), "").unwrap();
    fs::write(folder.join("ringfence"), "of the administrator").unwrap();
    symlink("/nowhere", folder.join("ringfence-pasta")).unwrap();
    for _ in 0..2 {
        install(folder, "install");
    }
    for name in ["ringfence-serve", "ringfence-pasta", "ringfence-passt"] {
        assert_eq!(fs::read_link(folder.join(name)).unwrap(), dist().join("apparmor").join(name));
    }
    install(folder, "remove");
    let names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "abi, and the administrator's profile: {names:?}");
    assert_eq!(fs::read_to_string(folder.join("ringfence")).unwrap(), "of the administrator");
}
