use proptest::prelude::*;

use super::super::program::testing::{Call as Tried, decide};
use super::super::{ENTRIES, numbers};
use super::*;

/// File as Podman and Docker have it, in small.
const ENGINE: &str = r#"{
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 38,
    "defaultErrno": "ENOSYS",
    "archMap": [
        {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]},
        {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
        {"architecture": "SCMP_ARCH_RISCV64", "subArchitectures": null}
    ],
    "syscalls": [
        {"names": ["execve", "read", "write", "sync_file_range2"], "action": "SCMP_ACT_ALLOW", "args": [], "comment": "", "includes": {}, "excludes": {}},
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
        {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": 22, "errno": "EINVAL",
         "args": [{"index": 0, "value": 16, "valueTwo": 0, "op": "SCMP_CMP_EQ"}, {"index": 2, "value": 9, "op": "SCMP_CMP_EQ"}]},
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 2, "value": 9, "op": "SCMP_CMP_NE"}]},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "excludes": {"caps": ["CAP_SYS_ADMIN"]},
         "args": [{"index": 0, "value": 2114060288, "op": "SCMP_CMP_MASKED_EQ"}]},
        {"names": ["clone", "mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "4.8"}},
        {"names": ["chroot"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "99.0"}},
        {"names": ["arch_prctl"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64", "x32"]}},
        {"names": ["s390_pci_mmio_read"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["s390"]}},
        {"name": "kill", "action": "SCMP_ACT_KILL_PROCESS"}
    ]
}"#;

fn rules(text: &str, has_capabilities: bool) -> Result<Rules, ProfileError> {
    let surroundings = Surroundings { has_capabilities, kernel: (6, 18) };
    Ok(Profile::parse(text.to_owned())?.rules_in(ENTRIES, &surroundings)?.0)
}

/// Returns the action of a call of a 64-bit program.
fn action(rules: &Rules, name: &str, arguments: &[u64]) -> Action {
    let number = numbers::number(name, NATIVE).unwrap();
    let mut all = [0; 6];
    all[..arguments.len()].copy_from_slice(arguments);
    decide(rules, &Tried { architecture: ENTRIES[0].architecture, number, arguments: all })
}

#[cfg(target_arch = "x86_64")]
#[test]
fn list_of_a_container_engine_is_evaluated_for_the_command() {
    let plain = rules(ENGINE, false).unwrap();
    let root = rules(ENGINE, true).unwrap();
    let unknown = Action::Errno(38);
    for rules in [&plain, &root] {
        assert_eq!(action(rules, "read", &[]), Action::Allow);
        assert_eq!(action(rules, "open", &[]), unknown);
        assert_eq!(action(rules, "personality", &[8]), Action::Allow);
        assert_eq!(action(rules, "personality", &[9]), unknown);
        assert_eq!(action(rules, "socket", &[16, 3, 9]), Action::Errno(22));
        assert_eq!(action(rules, "socket", &[2, 1, 9]), unknown);
        assert_eq!(action(rules, "socket", &[16, 3, 0]), Action::Allow);
        assert_eq!(action(rules, "ptrace", &[]), Action::Allow);
        assert_eq!(action(rules, "chroot", &[]), unknown);
        assert_eq!(action(rules, "arch_prctl", &[]), Action::Allow);
        assert_eq!(action(rules, "kill", &[]), Action::KillProcess);
    }
    assert_eq!(action(&plain, "clone", &[0x100]), Action::Allow);
    assert_eq!(action(&plain, "clone", &[0x1000_0100]), unknown);
    assert_eq!(action(&plain, "mount", &[]), unknown);
    assert_eq!(action(&root, "clone", &[0x1000_0100]), Action::Allow);
    assert_eq!(action(&root, "mount", &[]), Action::Allow);
    // The entry of 32-bit programs is listed, that of x32 is not.
    let of =
        |architecture, number| decide(&plain, &Tried { architecture, number, arguments: [0; 6] });
    let [x86_64, x86] = [0, 1].map(|entry| ENTRIES[entry].architecture);
    assert_eq!(of(x86, 3), Action::Allow);
    assert_eq!(of(x86, 5), unknown);
    assert_eq!(of(x86_64, X32_BIT), Action::KillProcess);
    assert_eq!(of(99, 0), Action::KillProcess);
}

#[test]
fn list_that_allows_by_default_denies_what_it_names() {
    let text = r#"{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [
        {"names": ["mount"], "action": "SCMP_ACT_ERRNO"},
        {"names": ["kill"], "action": "SCMP_ACT_TRAP"},
        {"names": ["setns"], "action": "SCMP_ACT_ERRNO"},
        {"names": ["setns"], "action": "SCMP_ACT_LOG"},
        {"names": ["kill"], "action": "SCMP_ACT_ERRNO", "errnoRet": 3, "args": [{"index": 1, "value": 9, "op": "SCMP_CMP_EQ"}]},
        {"names": ["dup"], "action": "SCMP_ACT_LOG", "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_LE"}, {"index": 0, "value": 7, "op": "SCMP_CMP_GE"}]}
    ]}"#;
    let rules = rules(text, false).unwrap();
    assert_eq!(action(&rules, "mount", &[]), Action::Errno(1));
    // An entry without conditions wins.
    assert_eq!(action(&rules, "kill", &[1, 9]), Action::Trap(0));
    // The first of several, as in the list of Podman.
    assert_eq!(action(&rules, "setns", &[]), Action::Errno(1));
    // Conditions about one argument hold one by one.
    assert_eq!(action(&rules, "dup", &[1]), Action::Log);
    assert_eq!(action(&rules, "dup", &[3]), Action::Allow);
    assert_eq!(action(&rules, "dup", &[8]), Action::Log);
}

#[test]
fn malformed_list_is_refused_with_line_and_name() {
    let with = |entry: &str| {
        format!("{{\n\"defaultAction\": \"SCMP_ACT_ERRNO\",\n\"syscalls\": [\n{entry}\n]}}")
    };
    let allow_by_default =
        |entry: &str| with(entry).replacen("SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW", 1);
    for (text, expected) in [
        (String::new(), "line 1"),
        ("{}".to_owned(), "missing field `defaultAction`"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALOW"}"#), "unknown variant `SCMP_ACT_ALOW`"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALOW"}"#), "line 4"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW", "argz": []}"#), "unknown field `argz`"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_NOTIFY"}"#), "line 4: `SCMP_ACT_NOTIFY` needs"),
        (allow_by_default(r#"{"names": ["raed"], "action": "SCMP_ACT_ERRNO"}"#), "line 4: `raed` is no system call"),
        (
            with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW"}"#),
            "line 1: it denies `execve`",
        ),
        (
            allow_by_default(r#"{"names": ["execve"], "action": "SCMP_ACT_KILL"}"#),
            "line 4: it denies `execve`",
        ),
        (with(r#"{"names": ["read"], "name": "write", "action": "SCMP_ACT_ALLOW"}"#), "both given"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}]}"#), "argument 6"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "value": -1, "op": "SCMP_CMP_EQ"}]}"#), "line 4"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMN"]}}"#), "`CAP_SYS_ADMN` is no capability"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["pdp11"]}}"#), "`pdp11` is no processor"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ALLOW", "excludes": {"minKernel": "six"}}"#), "`six` is no version"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 5000}"#), "line 4: 5000 is no error"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 22, "errno": "EPERM"}"#), "`EPERM` is the number 1"),
        (with(r#"{"names": ["read"], "action": "SCMP_ACT_ERRNO", "errno": "EWRONG"}"#), "`EWRONG` is no error"),
        (with("").replace("\"syscalls\"", "\"architectures\": [\"SCMP_ARCH_PDP11\"], \"syscalls\""), "unknown variant `SCMP_ARCH_PDP11`"),
        (with("").replace("\"syscalls\"", "\"flags\": [\"SECCOMP_FILTER_FLAG_LOG\"], \"syscalls\""), "unknown variant `SECCOMP_FILTER_FLAG_LOG`"),
        (with("").replace("\"syscalls\"", "\"listenerPath\": \"/run/x\", \"syscalls\""), "needs a supervisor"),
        (with("").replace("\"syscalls\"", "\"architectures\": [\"SCMP_ARCH_X86\"], \"archMap\": [{\"architecture\": \"SCMP_ARCH_X86_64\"}], \"syscalls\""), "leave one out"),
        (with("").replacen("\"syscalls\"", "\"defaultAction\": \"SCMP_ACT_LOG\", \"syscalls\"", 1), "duplicate field"),
    ] {
        match rules(&text, false) {
            Ok(_) => panic!("{text} is accepted; expected {expected}"),
            Err(error) => assert!(error.to_string().contains(expected), "{text}: {error}"),
        }
    }
}

#[test]
fn unknown_call_that_would_be_allowed_is_left_out_with_a_remark() {
    let text = r#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["execve", "read", "warp"], "action": "SCMP_ACT_ALLOW"}]}"#;
    let surroundings = Surroundings { has_capabilities: false, kernel: (6, 18) };
    let profile = Profile::parse(text.to_owned()).unwrap();
    let (rules, remarks) = profile.rules_in(ENTRIES, &surroundings).unwrap();
    assert_eq!(action(&rules, "read", &[]), Action::Allow);
    assert!(remarks.len() == 1 && remarks[0].contains("`warp`"), "{remarks:?}");
}

#[test]
fn file_without_end_is_refused() {
    let error = Profile::read(Path::new("/dev/zero")).unwrap_err();
    assert!(matches!(error, ProfileError::TooLong), "{error}");
}

/// Entry of a list, as text.
fn entry() -> impl Strategy<Value = String> {
    let names = ["read", "socket", "ioctl", "clone", "mount", "socketcall", "keyctl", "warp"];
    let names = prop::sample::subsequence(names.to_vec(), 1..4);
    let action =
        prop::sample::select(vec!["ALLOW", "ERRNO", "KILL", "KILL_PROCESS", "TRAP", "LOG"]);
    let operator = prop::sample::select(vec!["EQ", "NE", "LT", "LE", "GT", "GE", "MASKED_EQ"]);
    let value = prop_oneof![0..4_u64, Just(1 << 32), Just(u64::MAX), any::<u64>()];
    let argument = (0..6_u8, operator, value.clone(), value).prop_map(|(index, op, value, two)| {
        format!(
            r#"{{"index": {index}, "op": "SCMP_CMP_{op}", "value": {value}, "valueTwo": {two}}}"#
        )
    });
    (names, action, prop::collection::vec(argument, 0..4)).prop_map(|(names, action, args)| {
        format!(
            r#"{{"names": {names:?}, "action": "SCMP_ACT_{action}", "args": [{}]}}"#,
            args.join(",")
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn program_of_an_accepted_list_decides_as_the_list(
        default in prop::sample::select(vec!["ALLOW", "ERRNO", "KILL"]),
        entries in prop::collection::vec(entry(), 1..6),
        cut in 0..2_usize,
    ) {
        let map = r#"[{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]}]"#;
        let start = r#"{"names": ["execve"], "action": "SCMP_ACT_ALLOW"}"#;
        let entries = entries.join(",\n");
        let text = format!(r#"{{"defaultAction": "SCMP_ACT_{default}", "archMap": {map}, "syscalls": [{start}, {entries}]}}"#);
        fuzzing::check(&text.as_bytes()[cut..]);
    }

    #[test]
    fn arbitrary_text_is_parsed_or_refused(text in "[ -~\n]{0,200}") {
        fuzzing::check(text.as_bytes());
    }
}
