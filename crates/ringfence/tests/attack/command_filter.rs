//! Attacks of a guest's command on objects of the kernel that no namespace separates: socket families, keyrings, rings,
//! events, terminals; and the limits of `--strict`. As root and as an ordinary user. Each test fails if its guard is removed.

use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;

use crate::require;
use crate::support::needs::{Need, find_program};
use crate::support::users::Site;
use crate::support::{MOMENT, eventually};

const ATTACKS: &str =
    concat!(include_str!("../support/attempt.py"), include_str!("../support/command_filter.py"));

/// Writes the attacks where a guest of the site can run them. Returns the words of the command.
fn attacks(site: &Site, is_listed: bool) -> Vec<String> {
    let (script, scratch) = (site.lab.file("command_filter.py"), site.lab.file("scratch"));
    std::fs::write(&script, ATTACKS).unwrap();
    std::fs::create_dir_all(&scratch).unwrap();
    std::fs::set_permissions(&scratch, PermissionsExt::from_mode(0o777)).unwrap();
    let what = format!("{{\"scratch\": \"{}\", \"list\": {is_listed}}}", scratch.display());
    vec!["python3".to_owned(), script.to_str().unwrap().to_owned(), what]
}

/// Checks that each attack was tried and failed.
fn assert_kept_out(said: &str) {
    let attacks = said.lines().count();
    let written = ["    attempt(\"", "    of_list(\""].map(|call| ATTACKS.matches(call).count());
    assert_eq!(attacks, written.iter().sum::<usize>(), "{said}");
    let reached: Vec<_> = said.lines().filter(|line| !line.ends_with(": kept out")).collect();
    assert!(reached.is_empty(), "{reached:#?}");
}

#[test]
fn command_reaches_nothing_that_no_namespace_separates() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        for (options, is_listed) in [
            ("", true),
            ("--as-root", true),
            ("--strict", true),
            ("--seccomp none", false),
            ("--as-root --seccomp none", false),
        ] {
            let words = attacks(&site, is_listed);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            assert_kept_out(&site.run(options, &words).succeed(MOMENT * 2));
        }
    }
}

#[test]
fn further_command_of_a_guest_reaches_nothing_either() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let guest = site.bystander("--name held");
        let words = attacks(&site, true);
        let exec = [site.lab.program(), "exec", "held", "--"];
        let wrapper = site.wrapper.iter().map(String::as_str).chain(exec);
        let words: Vec<&str> = wrapper.chain(words.iter().map(String::as_str)).collect();
        assert_kept_out(&site.lab.spawn(&words).succeed(MOMENT * 2));
        guest.end();
    }
}

/// Prints the error numbers of sockets of each family and protocol that is given.
const SOCKETS: &str = "import socket,sys
for word in sys.argv[1:]:
    family, kind, protocol = map(int, word.split(','))
    try:
        socket.socket(family, kind, protocol)
        print('made', end=' ')
    except OSError as error:
        print(error.errno, end=' ')";

#[test]
fn sockets_that_a_command_needs_can_be_made() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        // Unix, IPv4, IPv6, echo requests; routes, diagnosis, netfilter, generic netlink; packets.
        let plain = [
            "1,1,0", "1,2,0", "2,1,0", "2,2,0", "10,1,0", "2,2,1", "16,3,0", "16,3,4", "16,3,12",
            "16,3,16",
        ];
        let said = |options: &str, sockets: &[&str]| {
            let words = [&["python3", "-c", SOCKETS], sockets].concat();
            site.run(options, &words).succeed(MOMENT)
        };
        assert_eq!(said("", &plain), "made ".repeat(plain.len()));
        assert_eq!(said("--strict", &plain), "made ".repeat(plain.len()));
        assert_eq!(said("--as-root", &["17,3,768", "2,3,1"]), "made made ");
    }
}

#[test]
fn family_that_an_option_allows_can_be_used() {
    /// Family, type and protocol of a socket of AF_VSOCK.
    const VSOCK: &str = "40,1,0";
    /// Those of a netlink socket of the audit log.
    const AUDIT: &str = "16,3,9";
    require!(Need::Guests, Need::Program("python3", "python3"));
    let own = std::process::Command::new("python3").args(["-c", SOCKETS, VSOCK]).output().unwrap();
    let of_host = String::from_utf8(own.stdout).unwrap();
    let said = |site: &Site, options: &str| {
        site.run(options, &["python3", "-c", SOCKETS, VSOCK, AUDIT]).succeed(MOMENT)
    };
    for site in Site::all() {
        assert_eq!(said(&site, ""), "97 93 ");
        assert_eq!(said(&site, "--allow-family AF_VSOCK"), format!("{of_host}93 "));
        assert_eq!(said(&site, "--allow-family netlink"), "97 made ");
        assert_eq!(said(&site, "--allow-family all"), format!("{of_host}made "));
    }
}

#[test]
fn list_of_a_file_replaces_the_default_one() {
    require!(Need::Guests);
    let site = Site::of(None);
    let list = site.lab.file("list.json");
    let with = |entries: &str| {
        let text =
            format!("{{\n\"defaultAction\": \"SCMP_ACT_ALLOW\",\n\"syscalls\": [\n{entries}\n]}}");
        std::fs::write(&list, text).unwrap();
    };
    let options = format!("--seccomp {}", list.display());
    let run = |script: &str| site.run(&options, &["sh", "-c", script]).finish(MOMENT);
    with(r#"{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 18}"#);
    let finished = run("LC_ALL=C mkdir new; test -e new || echo absent");
    assert!(finished.stderr.contains("cross-device link"), "{}", finished.stderr);
    assert_eq!(finished.stdout, "absent\n");
    with(r#"{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_KILL_PROCESS"}"#);
    assert_eq!(run("mkdir new; echo $?").stdout, "159\n");
    with(r#"{"names": ["mkdri"], "action": "SCMP_ACT_ERRNO"}"#);
    let finished = run("echo started");
    assert_eq!((finished.status, &*finished.stdout), (Some(125), ""));
    assert!(finished.stderr.contains("list.json: line 4: `mkdri`"), "{}", finished.stderr);
    std::fs::remove_file(&list).unwrap();
    let finished = run("echo started");
    assert_eq!(finished.status, Some(125));
    assert!(finished.stderr.contains("list.json: No such file"), "{}", finished.stderr);
}

/// Prints properties of a process that a filter changes.
const STATE: &str = "sed -n 's/^NoNewPrivs:.//p; s/^Seccomp:.//p' /proc/self/status | tr '\\n' ' '";

#[test]
fn filter_leaves_new_privileges_and_namespaces_unless_strict() {
    require!(Need::Guests);
    let script =
        format!("{STATE}; unshare --user --map-root-user true 2>&- && echo namespace || echo none");
    for site in Site::all() {
        assert_eq!(site.script("", &script), "0 2 namespace\n");
        assert_eq!(site.script("--seccomp none --allow-family all", &script), "0 0 namespace\n");
        assert_eq!(site.script("--strict", &script), "1 2 none\n");
        assert_eq!(
            site.script("--strict --seccomp none --allow-family all", &script),
            "1 2 none\n"
        );
    }
}

#[test]
fn programs_that_trace_and_nest_work_under_the_filter() {
    require!(Need::Guests);
    for site in Site::all() {
        let program = site.lab.program();
        let nested = format!("{program} run -q --uplink none --switch none -- echo nested");
        assert_eq!(site.script("", &nested), "nested\n");
        for (name, script) in [
            (
                "strace",
                "strace -f -o trace.txt sh -c 'true; true' && grep -c execve trace.txt >&2 && echo traced",
            ),
            (
                "gdb",
                "gdb -q -batch -ex run -ex quit --args true 2>&1 | grep -q 'exited normally' && echo traced",
            ),
        ] {
            if find_program(name).is_some() {
                assert_eq!(site.script("", script), "traced\n", "{name}");
            }
        }
    }
}

#[test]
fn strict_command_sees_working_directory_and_system_alone() {
    require!(Need::Guests);
    for site in Site::all() {
        let (home, kept) = (site.lab.file("home"), site.lab.file("home/kept"));
        let work = site.lab.file("home/project");
        for directory in [&home, &kept, &work] {
            std::fs::create_dir_all(directory).unwrap();
            std::fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).unwrap();
            std::fs::write(directory.join("file"), "content\n").unwrap();
            std::fs::set_permissions(directory.join("file"), PermissionsExt::from_mode(0o666))
                .unwrap();
        }
        let outside = site.lab.file("outside");
        std::fs::write(&outside, "").unwrap();
        let enter = format!("cd {} && HOME={} exec \"$@\"", work.display(), home.display());
        let script = format!(
            "cat file; echo made > made && echo written; ls -A ~ | tr '\\n' ' '; ls ~/kept; \
             (echo x > ~/kept/file) 2>&- || echo refused; touch ~/x /tmp/x && echo empty; \
             ls {} 2>&- || echo hidden; (touch /usr/ringfence-attack) 2>&- || echo read-only; \
             echo ends",
            outside.display()
        );
        let options = format!("--strict --ro {}", kept.display());
        let wrapper = ["sh", "-c", &enter, "sh"];
        let guest = site.run_with(&wrapper, &options, &["sh", "-c", &script]);
        let finished = guest.finish(MOMENT);
        let expected =
            "content\nwritten\nkept project file\nrefused\nempty\nhidden\nread-only\nends\n";
        assert_eq!(finished.stdout, expected, "{}", finished.stderr);
        assert_eq!(std::fs::read_to_string(work.join("made")).unwrap(), "made\n");
        assert!(!home.join("x").exists());
        // A home directory is not shown for being the working directory.
        let enter = format!("cd {0} && HOME={0} exec \"$@\"", home.display());
        let wrapper = ["sh", "-c", &enter, "sh"];
        let guest =
            site.run_with(&wrapper, "--strict", &["sh", "-c", "ls -A; touch new && echo empty"]);
        assert_eq!(guest.succeed(MOMENT), "empty\n");
    }
}

/// Looks for a segment of shared memory by its key, and for a message queue by its name; makes them first on request.
const IPC: &str = "import ctypes,os,sys
libc = ctypes.CDLL(None, use_errno=True)
key, name, flags = int(sys.argv[1]), sys.argv[2].encode(), 0o1000 | 0o666 if len(sys.argv) > 3 else 0
segment = libc.shmget(key, 4096, flags)
queue = libc.mq_open(name, 0o2 | (0o100 if flags else 0), 0o666, None)
print(segment >= 0, queue >= 0, flush=True)
if flags:
    sys.stdin.read()
    libc.shmctl(segment, 0, None)
    libc.mq_unlink(name)";

#[test]
fn ipc_objects_of_the_host_are_not_found() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let (key, name) =
            (std::process::id().to_string(), format!("/ringfence-{}", std::process::id()));
        let mut maker = std::process::Command::new("python3")
            .args(["-c", IPC, &key, &name, "make"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let said = std::io::BufReader::new(maker.stdout.take().unwrap()).read_line(&mut line);
        assert!(said.unwrap() > 0 && line.starts_with("True"), "{line}");
        for options in ["", "--as-root"] {
            let found = site.run(options, &["python3", "-c", IPC, &key, &name]).succeed(MOMENT);
            assert_eq!(found, "False False\n", "{options}");
        }
        drop(maker.stdin.take());
        let ended = eventually(MOMENT, || maker.try_wait().unwrap().is_some());
        assert!(ended, "the process that made the objects does not end with its input");
    }
}

#[test]
fn ps_and_status_name_the_filter() {
    require!(Need::Guests);
    let site = Site::of(None);
    let guest = site.bystander("--name filtered --allow-family vsock --seccomp none");
    let say =
        |words: &[&str]| site.lab.spawn(&[&[site.lab.program()], words].concat()).succeed(MOMENT);
    let shown = "none, families vsock";
    assert!(say(&["status", "filtered"]).contains(&format!("system calls:   {shown}\n")));
    assert!(say(&["ps", "--json"]).contains(&format!("\"filter\": \"{shown}\"")));
    guest.end();
}
