"""One driver process for each language, one live system, and the matrix at the end."""

from __future__ import annotations

import shlex

import pytest

from support.certificates import Certificates
from support.conformance.cases import all_cases
from support.conformance.drivers import LANGUAGES, ROOT, Driver, Language
from support.conformance.report import Matrix
from support.conformance.stage import LiveStage, LoopThread, ScriptedStage, refusing_address
from support.conformance.toolchains import missing
from support.keys import SECRET, entry
from support.system import System, simulated_model, simulated_system

REPORT = ROOT / "build" / "clients.md"
PAGE = ROOT / "clients" / "conformance.md"
MATRIX = pytest.StashKey[Matrix]()
CASE = "case"


def pytest_addoption(parser):
    parser.addoption(
        "--driver",
        metavar="COMMAND",
        help="test the client that this command drives, as tests/contract/vectors/clients/README.md"
        " says, instead of ours",
    )
    parser.addoption(
        "--rewrite-page",
        action="store_true",
        help="write what a whole run finds into clients/conformance.md",
    )


def languages(config):
    """Whose clients are tested: ours, or a stranger's."""
    command = config.getoption("--driver")
    if command is None:
        return LANGUAGES
    return (Language("driver", tuple(shlex.split(command)), built=".", make=""),)


def pytest_generate_tests(metafunc):
    if "driver" in metafunc.fixturenames:
        metafunc.parametrize(
            "driver",
            languages(metafunc.config),
            ids=lambda language: language.name,
            indirect=True,
            scope="session",
        )


@pytest.fixture(scope="session")
def driver(request):
    """A language's driver."""
    language = request.param
    if not language.is_built:
        missing(f"{language.built} is not there: make {language.make}")
    driver = Driver(language)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def server_files(certificates):
    return certificates.issue("127.0.0.1")


@pytest.fixture(scope="session")
def words(certificates, tmp_path_factory):
    """What stands for the words with a $ in the vectors' requests."""
    client = certificates.issue("client.invalid")
    stranger = Certificates(tmp_path_factory.mktemp("stranger"))
    unusable = unusable_files(tmp_path_factory.mktemp("unusable"), certificates.authority)
    with refusing_address() as nobody:
        yield {
            **unusable,
            "$nobody": nobody,
            "$authority": str(certificates.authority),
            "$strange_authority": str(stranger.authority),
            "$certificate": str(client.certificate),
            "$key": str(client.key),
            "$strange_key": str(stranger.issue("client.invalid").key),
        }


def unusable_files(folder, authority):
    """Files that TLS can do nothing with, by the words that stand for them."""
    pem = authority.read_text()
    contents = {
        "no_pem": "no PEM\n",
        "empty": "",
        "cut_off": pem[: len(pem) // 2],
        "damaged": pem.replace(pem.splitlines()[1], "!" * 64),
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    return {f"${name}": str(folder / name) for name in contents}


@pytest.fixture(scope="session")
def loop_thread():
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def words_system():
    """Simulated models of a readable vocabulary, a drafter and two targets."""
    with simulated_system().running() as system:
        yield system


@pytest.fixture(scope="session")
def locked_system(words_system, tmp_path_factory):
    """The same models behind an orchestrator that asks for a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(entry())
    locked = System(
        drafters=words_system.drafters,
        targets=words_system.targets,
        orchestrator_flags=(f"--api-keys={keys}",),
        key=SECRET,
    )
    with locked.running() as system:
        yield system


@pytest.fixture(scope="session")
def bytes_system():
    """A simulated target with few tokens but single bytes, whose text is seldom UTF-8."""
    target = simulated_model("target", seconds=0.002, simulated_vocabulary_size=300)
    with System(drafters=[], targets=[target]).running() as system:
        yield system


@pytest.fixture
def stage(request, loop_thread, server_files):
    """Where the test's case is played."""
    server = request.getfixturevalue("case").server
    if "live" in server:
        yield LiveStage(request.getfixturevalue(f"{server['live']}_system"))
        return
    with ScriptedStage(loop_thread, server, files=server_files).playing() as stage:
        yield stage


def pytest_configure(config):
    config.stash[MATRIX] = Matrix([language.name for language in languages(config)])
    config.pluginmanager.register(Outcomes(config.stash[MATRIX]))


class Outcomes:
    """Enters reports in a matrix, wherever their tests ran."""

    def __init__(self, matrix):
        self._matrix = matrix

    def pytest_runtest_logreport(self, report):
        for case in (value for name, value in report.user_properties if name == CASE):
            self._matrix.add(**case, outcome=report.outcome)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    if case is not None and (report.when == "call" or not report.passed):
        language = item.callspec.params["driver"].name
        which = {"group": case.group, "name": case.name, "language": language}
        report.user_properties.append((CASE, which))
    return report


def pytest_sessionfinish(session):
    """Hold the committed page against what a whole run found."""
    matrix, option = session.config.stash[MATRIX], session.config.getoption
    if option("--driver") or not matrix.is_whole(len(all_cases())):
        return
    if option("--rewrite-page"):
        PAGE.write_text(matrix.markdown())
    elif PAGE.read_text() != matrix.markdown():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\n{PAGE.relative_to(ROOT)} is stale: make conformance-page")


def pytest_terminal_summary(terminalreporter, config):
    matrix = config.stash[MATRIX]
    if not matrix:
        return
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(matrix.markdown())
    terminalreporter.section("clients")
    for line in matrix.summary():
        terminalreporter.line(line)
    terminalreporter.line(f"every case: {REPORT.relative_to(ROOT)}")
