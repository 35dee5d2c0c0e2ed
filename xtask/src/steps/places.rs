//! Step `place`: the README's second command, restricted to some tests, in a checkout at an unusual place.

use std::path::Path;

use taskkit::exec::Cmd;

use crate::context::{Context, Ended, outcome_of};
use crate::report::Outcome;

/// Memory in KiB that a checkout with its target directory may need.
const TMPFS_KIB: u64 = 8 << 20;

/// Parts of `local` that run: those with the tests below.
const PARTS: [&str; 3] = ["first_contact", "fronts", "guests"];

/// Tests that run: programs started from the checkout by root and by an ordinary user, files beside the sources, mounts over
/// directories, and pages.
const TESTS: [&str; 12] = [
    "demo_prints_a_row_for_each_mode_and_leaves_nothing",
    "run_without_tun_device_names_the_driver",
    "run_with_closed_tun_device_names_its_mode",
    "every_subcommand_has_an_end_to_end_test",
    "man_prints_a_page_and_installs_all",
    "completions_name_every_subcommand",
    "policy_preset_is_one_that_policy_check_accepts",
    "every_block_has_a_marker_and_every_page_its_test",
    "commands_of_readme_run",
    "default_socket_is_the_first_free_one",
    "example_starts_a_guest_and_stops_it",
    "command_of_an_ordinary_user_has_its_own_ids_and_no_capability",
];

pub(super) fn parts(_: &Context) -> anyhow::Result<Vec<String>> {
    Ok(["tmp", "spaces", "tmpfs", "read-only"].map(str::to_owned).into())
}

/// Runs the tests in a checkout of the last commit.
pub(super) fn run(context: &Context, kind: &str) -> anyhow::Result<Ended> {
    let own = format!("ringfence-place-{}", std::process::id());
    let folder = match kind {
        "tmp" => Path::new("/tmp").join(own),
        "tmpfs" if !context.toolbox.is_root => Path::new("/dev/shm").join(own),
        _ => context.target.join("place").join(kind),
    };
    if kind == "tmpfs"
        && let Some(why) = too_small((!context.toolbox.is_root).then_some(&*folder))?
    {
        return Ok(Outcome::Skipped(why).into());
    }
    remove(&folder)?;
    std::fs::create_dir_all(&folder)?;
    let only: Vec<String> = PARTS.iter().map(|part| format!("local/{part}")).collect();
    let mut words = vec!["xtask", "test"];
    // Without an installation nothing may require the programs that the tests need.
    words.extend((!context.require_local).then_some("--no-install"));
    let only = only.join(",");
    words.extend(["--only", &only]);
    words.extend(TESTS);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let script = context.root.join("xtask/place.sh");
    // Without options `unshare` makes no namespace.
    let namespace = if context.toolbox.is_root { "--mount" } else { "--" };
    let command = Cmd::new("unshare").args([namespace, "sh"]).args([script]).args([kind]);
    let checkout = folder.join(if kind == "spaces" { "with some blanks" } else { "checkout" });
    let places = [folder.as_os_str(), checkout.as_os_str(), context.root.as_os_str()];
    let command = command.args(places).args([cargo]).args(words);
    let command = command.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_MANIFEST_DIR");
    let success = command.run(&context.root)?;
    remove(&folder)?;
    Ok(outcome_of(success, &format!("tests fail in {}", folder.display())))
}

/// Returns the reason for which a tmpfs has no room for the checkout: that at `folder`, or a new one.
fn too_small(folder: Option<&Path>) -> anyhow::Result<Option<String>> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let memory = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    let room = match folder.and_then(Path::parent) {
        Some(parent) => {
            let found = rustix::fs::statvfs(parent)?;
            memory.min(found.f_bavail * found.f_frsize / 1024)
        }
        None => memory,
    };
    let gib = |kib: u64| kib >> 20;
    let why = format!("a tmpfs needs {} GiB here, and has {}", gib(TMPFS_KIB), gib(room));
    Ok((room < TMPFS_KIB).then_some(why))
}

/// Removes a directory whose files may be write-protected, if it exists.
fn remove(folder: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        Cmd::new("chmod").args(["-R", "u+w"]).args([folder]).probe();
        std::fs::remove_dir_all(folder)?;
    }
    Ok(())
}
