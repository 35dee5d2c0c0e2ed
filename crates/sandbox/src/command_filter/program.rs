//! Translation of rules about system calls into a program of classic BPF, as seccomp(2) runs it.
//!
//! ```text
//! Rules ── one Table for each architecture ──> ranges of numbers ──> binary search, then comparisons of arguments
//! ```
//!
//! A program compares the architecture first, so that a call by another entry of the kernel (`int 0x80`) is judged by
//! the numbers of that entry. It finds the range of the call's number by binary search. The kernel notices numbers that
//! are allowed whatever the arguments, and does not run the program for them at all.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_sys::seccomp::{INSTRUCTIONS_MAX, Instruction};

// Operations of classic BPF (linux/filter.h): BPF_LD | BPF_W | BPF_ABS and so on.
const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const RETURN: u16 = 0x06;

/// Offset of the number in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
/// Offset of the architecture.
const ARCHITECTURE_AT: u32 = 4;
/// Offset of the first argument. Each has 64 bits.
const ARGUMENTS_AT: u32 = 16;

/// Number with which a tracer skips a call.
const SKIPPED: u32 = u32::MAX;

/// Answer of a filter to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    KillProcess,
    KillThread,
    /// `SIGSYS`, with this number for its handler.
    Trap(u16),
    /// The call fails with this error.
    Errno(u16),
    /// A tracer decides; it gets this number.
    Trace(u16),
    /// The call is made and logged.
    Log,
    Allow,
}

impl Action {
    /// Returns the value of a program (`SECCOMP_RET_*` in `linux/seccomp.h`).
    pub(super) fn value(self) -> u32 {
        match self {
            Action::KillProcess => 0x8000_0000,
            Action::KillThread => 0,
            Action::Trap(data) => 0x0003_0000 | u32::from(data),
            Action::Errno(number) => 0x0005_0000 | u32::from(number),
            Action::Trace(data) => 0x7ff0_0000 | u32::from(data),
            Action::Log => 0x7ffc_0000,
            Action::Allow => 0x7fff_0000,
        }
    }

    /// Returns the place in the order of the kernel, the strictest first.
    pub(super) fn strictness(self) -> u8 {
        match self {
            Action::KillProcess => 0,
            Action::KillThread => 1,
            Action::Trap(_) => 2,
            Action::Errno(_) => 3,
            Action::Trace(_) => 4,
            Action::Log => 5,
            Action::Allow => 6,
        }
    }
}

/// Relation between an argument and the value of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relation {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    /// Equal after masking with these bits.
    MaskedEqual(u64),
}

/// Condition on an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    /// Position of the argument, from 0 to 5.
    pub(super) argument: u8,
    pub(super) relation: Relation,
    pub(super) value: u64,
}

impl Condition {
    /// Compares the low 32 bits of an argument that the kernel takes for an `int`. A caller may set the others as it likes.
    pub(super) fn int(argument: u8, value: u32) -> Condition {
        Condition::int_masked(argument, u32::MAX, value)
    }

    /// Compares some of the low 32 bits.
    pub(super) fn int_masked(argument: u8, mask: u32, value: u32) -> Condition {
        let relation = Relation::MaskedEqual(mask.into());
        Condition { argument, relation, value: value.into() }
    }
}

/// Rule about one call: the action if all conditions hold. The first rule that holds decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) when: Vec<Condition>,
    pub(super) action: Action,
}

/// Rules for the calls of one architecture.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// Number of the architecture (`AUDIT_ARCH_*` in `linux/audit.h`).
    pub(super) architecture: u32,
    /// Actions for calls without a rule that holds: each for the numbers from this one to the next. The first is 0.
    pub(super) otherwise: BTreeMap<u32, Action>,
    pub(super) rules: BTreeMap<u32, Vec<Rule>>,
}

/// Rules for all calls.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    pub(super) tables: Vec<Table>,
    /// Action for the calls of every other architecture.
    pub(super) foreign: Action,
}

/// Error of a program that is longer than the kernel accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the filter needs {0} instructions; the kernel accepts {INSTRUCTIONS_MAX}")]
pub struct TooLong(usize);

/// Decision about all numbers of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Decision<'a> {
    rules: &'a [Rule],
    otherwise: Action,
}

impl Decision<'_> {
    /// Returns the action if it does not depend on the arguments.
    fn constant(&self) -> Option<Action> {
        let first = self
            .rules
            .first()
            .map_or(Some(self.otherwise), |rule| rule.when.is_empty().then_some(rule.action))?;
        Some(first)
    }
}

impl Table {
    fn decision(&self, number: u32) -> Decision<'_> {
        let range = self.otherwise.range(..=number).next_back();
        let otherwise = range.map_or(Action::KillProcess, |(_, action)| *action);
        let rules = self.rules.get(&number).map_or(&[][..], Vec::as_slice);
        if number == SKIPPED {
            return Decision { rules: &[], otherwise: Action::Allow };
        }
        Decision { rules, otherwise }
    }

    /// Returns the first numbers of ranges with one decision each, in their order.
    fn ranges(&self) -> Vec<(u32, Decision<'_>)> {
        let mut starts: BTreeSet<u32> = self.otherwise.keys().copied().collect();
        starts.extend([0, SKIPPED]);
        for &number in self.rules.keys() {
            starts.extend([Some(number), number.checked_add(1)].into_iter().flatten());
        }
        let mut ranges: Vec<(u32, Decision<'_>)> = vec![];
        for start in starts {
            let decision = self.decision(start);
            let is_same = ranges.last().is_some_and(|(_, last)| {
                last.constant().is_some() && last.constant() == decision.constant()
            });
            if !is_same {
                ranges.push((start, decision));
            }
        }
        ranges
    }
}

/// Translates rules into one program.
pub(super) fn translate(rules: &Rules) -> Result<Vec<Instruction>, TooLong> {
    let mut code = Code::default();
    code.push(LOAD, ARCHITECTURE_AT);
    for table in &rules.tables {
        let skip = code.when_far(JUMP_EQUAL, table.architecture, false);
        code.push(LOAD, NUMBER_AT);
        code.search(&table.ranges());
        code.land(skip);
    }
    code.push(RETURN, rules.foreign.value());
    let length = code.instructions.len();
    // A rule has at most six conditions, so a jump within it is never too far.
    let is_whole = length <= INSTRUCTIONS_MAX && !code.is_broken;
    if is_whole { Ok(code.instructions) } else { Err(TooLong(length)) }
}

/// Jump whose target is not known yet, with the index of its instruction.
enum Pending {
    /// An instruction of its own, which leads any distance.
    Far(usize),
    /// Taken by a comparison that holds, at most 255 instructions far.
    IfHeld(usize),
    /// Taken by a comparison that does not hold.
    IfNot(usize),
}

/// Instructions in their order. All jumps lead forward.
#[derive(Default)]
struct Code {
    instructions: Vec<Instruction>,
    /// Set if a jump was too far for its instruction.
    is_broken: bool,
}

impl Code {
    fn push(&mut self, code: u16, k: u32) {
        self.instructions.push(Instruction { code, jt: 0, jf: 0, k });
    }

    /// Continues if a comparison holds. Otherwise jumps to where the result lands.
    fn unless(&mut self, comparison: u16, k: u32) -> Pending {
        self.push(comparison, k);
        Pending::IfNot(self.instructions.len() - 1)
    }

    /// Jumps to where the result lands if a comparison holds.
    fn when(&mut self, comparison: u16, k: u32) -> Pending {
        self.push(comparison, k);
        Pending::IfHeld(self.instructions.len() - 1)
    }

    /// Jumps to where the result lands, at any distance, if a comparison holds or, with `held` false, if it does not.
    fn when_far(&mut self, comparison: u16, k: u32, held: bool) -> Pending {
        let (jt, jf) = if held { (0, 1) } else { (1, 0) };
        self.instructions.push(Instruction { code: comparison, jt, jf, k });
        self.push(JUMP, 0);
        Pending::Far(self.instructions.len() - 1)
    }

    /// Makes the next instruction the target of a jump.
    fn land(&mut self, jump: Pending) {
        let next = self.instructions.len();
        let (Pending::Far(at) | Pending::IfHeld(at) | Pending::IfNot(at)) = jump;
        let distance = next - at - 1;
        let Some(instruction) = self.instructions.get_mut(at) else { return };
        let landed = match jump {
            Pending::Far(_) => u32::try_from(distance).map(|k| instruction.k = k),
            Pending::IfHeld(_) => u8::try_from(distance).map(|jt| instruction.jt = jt),
            Pending::IfNot(_) => u8::try_from(distance).map(|jf| instruction.jf = jf),
        };
        self.is_broken |= landed.is_err();
    }

    /// Finds the range of the number, which is loaded, and decides.
    fn search(&mut self, ranges: &[(u32, Decision<'_>)]) {
        let (lower, upper) = ranges.split_at(ranges.len() / 2);
        if let ([], [(_, decision)]) = (lower, upper) {
            return self.decide(decision);
        }
        let Some((middle, _)) = upper.first() else { return };
        // Jumps are relative, so the lower half can be translated by itself, to choose the jump by its length.
        let mut below = Code::default();
        below.search(lower);
        let is_near = below.instructions.len() <= usize::from(u8::MAX);
        let above = if is_near {
            self.when(JUMP_GREATER_OR_EQUAL, *middle)
        } else {
            self.when_far(JUMP_GREATER_OR_EQUAL, *middle, true)
        };
        self.instructions.append(&mut below.instructions);
        self.is_broken |= below.is_broken;
        self.land(above);
        self.search(upper);
    }

    fn decide(&mut self, decision: &Decision<'_>) {
        for rule in decision.rules {
            let failed: Vec<Pending> =
                rule.when.iter().flat_map(|condition| self.compare(condition)).collect();
            self.push(RETURN, rule.action.value());
            if failed.is_empty() {
                return;
            }
            failed.into_iter().for_each(|jump| self.land(jump));
        }
        self.push(RETURN, decision.otherwise.value());
    }

    /// Continues if a condition holds. Returns the jumps that are taken otherwise.
    fn compare(&mut self, condition: &Condition) -> Vec<Pending> {
        let [low, high] = [condition.value & 0xffff_ffff, condition.value >> 32].map(low_word);
        let at = ARGUMENTS_AT + 8 * u32::from(condition.argument);
        let [low_at, high_at] =
            if cfg!(target_endian = "big") { [at + 4, at] } else { [at, at + 4] };
        match condition.relation {
            Relation::Equal => {
                self.push(LOAD, high_at);
                let first = self.unless(JUMP_EQUAL, high);
                self.push(LOAD, low_at);
                vec![first, self.unless(JUMP_EQUAL, low)]
            }
            Relation::NotEqual => {
                self.push(LOAD, high_at);
                let holds = self.unless(JUMP_EQUAL, high);
                self.push(LOAD, low_at);
                let failed = self.when(JUMP_EQUAL, low);
                self.land(holds);
                vec![failed]
            }
            Relation::MaskedEqual(mask) => {
                let mut failed = vec![];
                let [low_mask, high_mask] = [mask & 0xffff_ffff, mask >> 32].map(low_word);
                for (at, mask, value) in [(high_at, high_mask, high), (low_at, low_mask, low)] {
                    // No bit of this half matters, unless the value can never be met.
                    if mask != 0 || value != 0 {
                        self.push(LOAD, at);
                        if mask != u32::MAX {
                            self.push(AND, mask);
                        }
                        failed.push(self.unless(JUMP_EQUAL, value));
                    }
                }
                failed
            }
            Relation::Greater => self.above([high_at, low_at], [high, low], JUMP_GREATER),
            Relation::GreaterOrEqual => {
                self.above([high_at, low_at], [high, low], JUMP_GREATER_OR_EQUAL)
            }
            Relation::Less => self.not_above([high_at, low_at], [high, low], JUMP_GREATER_OR_EQUAL),
            Relation::LessOrEqual => self.not_above([high_at, low_at], [high, low], JUMP_GREATER),
        }
    }

    /// Continues if an argument is greater than a value, or also equal, by the comparison of the low half.
    fn above(&mut self, at: [u32; 2], value: [u32; 2], comparison: u16) -> Vec<Pending> {
        self.push(LOAD, at[0]);
        let holds = self.when(JUMP_GREATER, value[0]);
        let less = self.unless(JUMP_EQUAL, value[0]);
        self.push(LOAD, at[1]);
        let also_less = self.unless(comparison, value[1]);
        self.land(holds);
        vec![less, also_less]
    }

    /// Continues where [`Code::above`] does not.
    fn not_above(&mut self, at: [u32; 2], value: [u32; 2], comparison: u16) -> Vec<Pending> {
        self.push(LOAD, at[0]);
        let above = self.when(JUMP_GREATER, value[0]);
        let holds = self.unless(JUMP_EQUAL, value[0]);
        self.push(LOAD, at[1]);
        let also_above = self.when(comparison, value[1]);
        self.land(holds);
        vec![above, also_above]
    }
}

/// Returns a half of a value, which has at most 32 bits.
fn low_word(half: u64) -> u32 {
    u32::try_from(half).unwrap_or(u32::MAX)
}

/// Second readings of rules and programs, for tests.
#[cfg(any(test, feature = "test-utils"))]
pub(super) mod testing {
    use super::{
        AND, Action, Condition, Instruction, JUMP, JUMP_EQUAL, JUMP_GREATER, JUMP_GREATER_OR_EQUAL,
        LOAD, RETURN, Relation, Rules,
    };

    /// System call as a filter sees it.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct Call {
        pub(in super::super) architecture: u32,
        pub(in super::super) number: u32,
        pub(in super::super) arguments: [u64; 6],
    }

    impl Call {
        /// Returns the 32 bits at an offset of `struct seccomp_data`.
        fn word(&self, at: u32) -> Option<u32> {
            let mut bytes = [0; 64];
            bytes[..4].copy_from_slice(&self.number.to_ne_bytes());
            bytes[4..8].copy_from_slice(&self.architecture.to_ne_bytes());
            for (argument, place) in self.arguments.iter().zip(bytes[16..].chunks_exact_mut(8)) {
                place.copy_from_slice(&argument.to_ne_bytes());
            }
            let at = usize::try_from(at).ok().filter(|at| at % 4 == 0)?;
            Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
        }
    }

    /// Runs a program as the kernel does. `None`: a rule of the kernel is broken, so it would be refused.
    pub(in super::super) fn run(program: &[Instruction], call: &Call) -> Option<u32> {
        let (mut at, mut accumulator) = (0_usize, 0_u32);
        loop {
            let Instruction { code, jt, jf, k } = *program.get(at)?;
            at += 1;
            let jump = |holds: bool| usize::from(if holds { jt } else { jf });
            match code {
                LOAD => accumulator = call.word(k)?,
                AND => accumulator &= k,
                JUMP => at += usize::try_from(k).ok()?,
                JUMP_EQUAL => at += jump(accumulator == k),
                JUMP_GREATER => at += jump(accumulator > k),
                JUMP_GREATER_OR_EQUAL => at += jump(accumulator >= k),
                RETURN => return Some(k),
                _ => return None,
            }
        }
    }

    fn holds(condition: &Condition, arguments: &[u64; 6]) -> bool {
        let argument = arguments[usize::from(condition.argument)];
        let value = condition.value;
        match condition.relation {
            Relation::Equal => argument == value,
            Relation::NotEqual => argument != value,
            Relation::Less => argument < value,
            Relation::LessOrEqual => argument <= value,
            Relation::Greater => argument > value,
            Relation::GreaterOrEqual => argument >= value,
            Relation::MaskedEqual(mask) => argument & mask == value,
        }
    }

    /// Returns the action of a call by reading the rules one after the other.
    pub(in super::super) fn decide(rules: &Rules, call: &Call) -> Action {
        let is_own = |table: &&super::Table| table.architecture == call.architecture;
        let Some(table) = rules.tables.iter().find(is_own) else { return rules.foreign };
        if call.number == u32::MAX {
            return Action::Allow;
        }
        let of_call = table.rules.get(&call.number).into_iter().flatten();
        let mut of_call =
            of_call.filter(|rule| rule.when.iter().all(|when| holds(when, &call.arguments)));
        let range = table.otherwise.range(..=call.number).next_back();
        let otherwise = range.map_or(Action::KillProcess, |(_, action)| *action);
        of_call.next().map_or(otherwise, |rule| rule.action)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::{Call, decide, run};
    use super::*;

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            Just(Action::Allow),
            Just(Action::KillProcess),
            Just(Action::KillThread),
            Just(Action::Log),
            any::<u16>().prop_map(Action::Errno),
        ]
    }

    /// Values that meet each other often, in both halves.
    fn value() -> impl Strategy<Value = u64> {
        let half = prop_oneof![Just(0_u64), Just(1), Just(2), Just(0xffff_ffff), 0..8_u64];
        (half.clone(), half).prop_map(|(high, low)| high << 32 | low)
    }

    fn condition() -> impl Strategy<Value = Condition> {
        let relation = prop_oneof![
            Just(Relation::Equal),
            Just(Relation::NotEqual),
            Just(Relation::Less),
            Just(Relation::LessOrEqual),
            Just(Relation::Greater),
            Just(Relation::GreaterOrEqual),
            value().prop_map(Relation::MaskedEqual),
        ];
        (0..6_u8, relation, value()).prop_map(|(argument, relation, value)| Condition {
            argument,
            relation,
            value,
        })
    }

    fn table(architecture: u32) -> impl Strategy<Value = Table> {
        let rule = (prop::collection::vec(condition(), 0..4), action())
            .prop_map(|(when, action)| Rule { when, action });
        let rules =
            prop::collection::btree_map(0..40_u32, prop::collection::vec(rule, 1..4), 0..20);
        let otherwise = prop::collection::btree_map(1..60_u32, action(), 0..4);
        (rules, otherwise, action()).prop_map(move |(rules, mut otherwise, first)| {
            otherwise.insert(0, first);
            Table { architecture, otherwise, rules }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn program_decides_as_its_rules(
            first in table(7),
            second in table(9),
            calls in prop::collection::vec((6..10_u32, 0..70_u32, prop::array::uniform6(value())), 1..60),
        ) {
            let rules = Rules { tables: vec![first, second], foreign: Action::Errno(38) };
            let program = translate(&rules).unwrap();
            for (architecture, number, arguments) in calls {
                for number in [number, u32::MAX - number] {
                    let call = Call { architecture, number, arguments };
                    prop_assert_eq!(run(&program, &call), Some(decide(&rules, &call).value()));
                }
            }
        }
    }

    #[test]
    fn rules_that_need_too_many_instructions_are_refused() {
        let rule = Rule { when: vec![Condition::int(0, 1)], action: Action::Errno(1) };
        let rules = (0..2000).map(|number| (number, vec![rule.clone()])).collect();
        let table = Table { architecture: 1, otherwise: [(0, Action::Allow)].into(), rules };
        let rules = Rules { tables: vec![table], foreign: Action::KillProcess };
        assert!(matches!(translate(&rules), Err(TooLong(length)) if length > INSTRUCTIONS_MAX));
    }

    #[test]
    fn high_bits_of_an_int_do_not_matter() {
        let rule = Rule { when: vec![Condition::int(0, 40)], action: Action::Errno(97) };
        let table = Table {
            architecture: 1,
            otherwise: [(0, Action::Allow)].into(),
            rules: [(41, vec![rule])].into(),
        };
        let rules = Rules { tables: vec![table], foreign: Action::KillProcess };
        let program = translate(&rules).unwrap();
        for (family, expected) in
            [(40, Action::Errno(97)), (40 | 1 << 32, Action::Errno(97)), (41, Action::Allow)]
        {
            let arguments = [family, 0, 0, 0, 0, 0];
            let call = Call { architecture: 1, number: 41, arguments };
            assert_eq!(run(&program, &call), Some(expected.value()), "{family:#x}");
        }
    }
}
