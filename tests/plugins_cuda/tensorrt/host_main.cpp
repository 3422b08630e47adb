// Every method of the plugins that needs no GPU, called as TensorRT calls it: host_test LIBRARY TEST.
#include "check.h"

int main(int count, char** arguments) {
    if (count != 3 || !Suite::tests().contains(arguments[2])) {
        std::fprintf(stderr, "usage: host_test LIBRARY TEST\n");
        return 2;
    }
    Suite::tests()[arguments[2]](Library(arguments[1]));
    return Suite::failures == 0 ? 0 : 1;
}
