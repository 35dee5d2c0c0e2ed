//! Attacks of a guest's command on objects of the kernel that have names: cgroups, shared memory, queues, processes,
//! descriptors and timers. As root, as an ordinary user, and with `--as-root`.

use rustix::process::Signal;

use crate::require;
use crate::support::cgroups::CgroupTree;
use crate::support::needs::{Need, skip_for_the_kernel};
use crate::support::users::{Site, USER};
use crate::support::{MOMENT, Running, eventually};

const CGROUPS: &str =
    concat!(include_str!("../support/attempt.py"), include_str!("../support/cgroups.py"));
const OBJECTS: &str =
    concat!(include_str!("../support/attempt.py"), include_str!("../support/kernel_objects.py"));

/// Checks that each attack of a program was tried and failed.
fn assert_kept_out(program: &str, said: &str) {
    let attacks: Vec<&str> = said.lines().collect();
    assert_eq!(attacks.len(), program.matches("attempt(\"").count(), "{said}");
    let reached: Vec<_> = attacks.iter().filter(|line| !line.ends_with(": kept out")).collect();
    assert!(reached.is_empty(), "{reached:#?}");
}

/// Returns the words that start a launcher of the site's user in its cgroup of the tree.
fn words(site: &Site, tree: &CgroupTree) -> Vec<String> {
    let enter = ["sh", "-c", &tree.enter(), "sh"].map(str::to_owned);
    enter.into_iter().chain(site.wrapper.iter().cloned()).collect()
}

fn start(site: &Site, tree: &CgroupTree, options: &str, command: &[&str]) -> Running {
    let words = words(site, tree);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    site.lab.start(options, command, &words)
}

#[test]
fn command_changes_no_cgroup_outside_of_its_guest() {
    require!(Need::Guests, Need::Root, Need::Program("python3", "python3"));
    for (user, options) in [(None, ""), (Some(USER), ""), (Some(USER), "--as-root")] {
        let site = Site::of(user);
        let mut tree = match CgroupTree::new(user.unwrap_or(0)) {
            Ok(tree) => tree,
            Err(reason) => return skip_for_the_kernel(&reason),
        };
        let scratch = site.lab.file("scratch");
        std::fs::create_dir(&scratch).unwrap();
        std::fs::set_permissions(&scratch, std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
        let command = ["python3", "-c", CGROUPS, tree.victim(), scratch.to_str().unwrap()];
        let said = start(&site, &tree, options, &command).succeed(MOMENT * 3);
        assert_kept_out(CGROUPS, &said);
        assert!(tree.is_victim_unharmed());
        tree.assert_no_guest();
    }
}

#[test]
fn cgroup_of_a_guest_is_removed_also_when_its_launcher_is_killed() {
    require!(Need::Guests, Need::Root);
    for user in [None, Some(USER)] {
        let site = Site::of(user);
        let tree = match CgroupTree::new(user.unwrap_or(0)) {
            Ok(tree) => tree,
            Err(reason) => return skip_for_the_kernel(&reason),
        };
        for stops_supervisor in [false, true] {
            let guest = start(&site, &tree, "-q --switch none", &["sleep", "1000"]);
            let runs = || {
                guest.processes().iter().any(|p| p.arguments.first().is_some_and(|a| a == "sleep"))
            };
            assert!(eventually(MOMENT, runs));
            let own = format!("ringfence-{}", guest.pid().as_raw_nonzero());
            assert_eq!(tree.of_guests(), [own]);
            if stops_supervisor {
                let launcher = guest.pid().as_raw_nonzero().get();
                let init = guest.inner("guest-init");
                let supervisor = guest
                    .processes()
                    .into_iter()
                    .find(|p| p.parent == launcher && p.pid.as_raw_nonzero().get() == init.parent);
                supervisor.unwrap().signal(Signal::STOP);
            }
            rustix::process::kill_process(guest.pid(), Signal::KILL).unwrap();
            guest.finish(MOMENT);
            tree.assert_no_guest();
        }
    }
}

#[test]
fn command_reaches_no_kernel_object_of_the_host_by_its_name() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let pid = std::process::id();
        let mut what = serde_json::json!({
            "role": "victim",
            "key": 0x5246_0000_u32 | (pid & 0xffff),
            "queue": format!("/ringfence-test-{pid}"),
            "queues": site.lab.file("queues"),
            "abstract": format!("ringfence-test-{pid}"),
            "marker": format!("marker-{pid}"),
        });
        let gate = site.lab.file("gate");
        let _ = std::fs::remove_file(&gate);
        // The victim ends when the gate is removed.
        std::fs::write(&gate, "").unwrap();
        let script = "(while [ -e \"$1\" ]; do sleep 0.05; done) | python3 -c \"$2\" \"$3\" \"$4\"";
        let (marker, text) = (format!("marker-{pid}-"), what.to_string());
        let gate_path = gate.to_str().unwrap();
        let victim =
            site.lab.spawn(&["sh", "-c", script, "sh", gate_path, OBJECTS, &text, &marker]);
        victim.wait_for_output("ready");
        what["role"] = "attacker".into();
        // As root, the host's queues are mounted, as on most hosts.
        std::fs::create_dir_all(site.lab.file("queues")).unwrap();
        let mounts = "mount -t mqueue none queues && ls queues >&2 && exec \"$@\"";
        let is_root = rustix::process::geteuid().is_root();
        let outer: Vec<&str> = if is_root {
            ["unshare", "--mount", "sh", "-c", mounts, "sh"].to_vec()
        } else {
            vec![]
        };
        // The caller of the test may have handed in descriptors.
        let close = "import os, sys; os.closerange(3, 4096); os.execvp(sys.argv[1], sys.argv[1:])";
        let user = site.wrapper.iter().map(String::as_str);
        let wrapper: Vec<&str> =
            outer.into_iter().chain(["python3", "-c", close]).chain(user).collect();
        let text = what.to_string();
        for options in ["", "--as-root"] {
            let guest = site.lab.start(options, &["python3", "-c", OBJECTS, &text], &wrapper);
            let finished = guest.finish(MOMENT * 2);
            assert!(!is_root || finished.stderr.contains("ringfence-test-"), "{}", finished.stderr);
            assert_kept_out(OBJECTS, &finished.stdout);
        }
        std::fs::remove_file(&gate).unwrap();
        victim.succeed(MOMENT);
    }
}

#[test]
fn directory_given_as_a_descriptor_or_stream_does_not_reach_the_command() {
    require!(Need::Guests);
    for site in Site::all() {
        let lab = &site.lab;
        std::fs::write(lab.file("seven"), "the seventh\n").unwrap();
        let wrapper = site.wrapper.join(" ");
        let run = format!("{wrapper} {} run --uplink none", lab.program());
        // A file passes, a directory does not, whether opened for reading or only named.
        let inner = "cat <&8; ls /proc/self/fd/7/ /dev/fd/7/ 2>/dev/null; echo end";
        let script = format!("exec 7</ 8<seven; {run} --ro / -- sh -c '{inner}'");
        let finished = lab.spawn(&["sh", "-c", &script]).finish(MOMENT);
        assert_eq!(finished.stdout, "the seventh\nend\n", "{}", finished.stderr);
        assert!(finished.stderr.contains("descriptor 7 is a directory"), "{}", finished.stderr);
        let script = format!("{run} -- ls /proc/self/fd/0/ </");
        let finished = lab.spawn(&["sh", "-c", &script]).finish(MOMENT);
        assert_eq!((finished.status, finished.stdout.as_str()), (Some(125), ""));
        assert!(finished.stderr.contains("standard input is a directory"), "{}", finished.stderr);
        let guest = site.bystander("--name web --switch blue");
        let script = format!("{wrapper} {} exec web -- ls /proc/self/fd/0/ </", lab.program());
        let finished = lab.spawn(&["sh", "-c", &script]).finish(MOMENT);
        assert_eq!((finished.status, finished.stdout.as_str()), (Some(125), ""));
        assert!(finished.stderr.contains("is a directory"), "{}", finished.stderr);
        guest.end();
    }
}
